// An array without dimensions: one value, as often as there are devices that it lies on.

import { s } from "../shared/dom.js";
import { counted } from "../shared/format.js";
import { copies } from "../shared/mesh.js";

/** @import { Leaf } from "../shared/mesh.js" */

const SIDE = 34;
const AT = { x: 16.5, y: 36.5 };

/**
 * `{height, box, parts, mark(on)}`: its elements, and those that show whether a device is chosen.
 *
 * @param {Leaf} leaf
 */
export function scalar(leaf) {
  const count = copies(leaf);
  const behind = Array.from({ length: Math.min(3, count - 1) }, (_, i) => 4 * (i + 1)).reverse();
  const square = (/** @type {number} */ shift) => ({ x: AT.x + shift, y: AT.y - shift, width: SIDE, height: SIDE });
  const key = leaf.dtype.startsWith("key");
  const text = (/** @type {number} */ y, /** @type {string} */ words) =>
    s("text", { class: "jsm-ink", x: AT.x + SIDE + 22, y }, words);
  const middle = { x: AT.x + SIDE / 2, y: AT.y + SIDE / 2 + 4, "text-anchor": "middle" };
  return {
    height: AT.y + SIDE + 8,
    box: square(0),
    parts: [
      behind.map((shift) => s("rect", { class: "jsm-frame", ...square(shift) })),
      s("rect", { class: "jsm-map-plate", ...square(0) }),
      s("rect", { class: "jsm-frame", ...square(0) }),
      text(AT.y + 6, key ? "one key," : "one value,"),
      text(AT.y + 22, count > 1 ? counted(count, "copy", "copies") : "on one device"),
    ],
    mark: (/** @type {boolean} */ on) => [
      on ? s("rect", { class: "jsm-detail-shown", ...square(0) }) : null,
      s("text", { class: `jsm-mono ${on ? "jsm-detail-on-shown" : "jsm-ink"}`, ...middle }, key ? "key" : "0-d"),
    ],
  };
}

/**
 * Whether a point lies on it.
 *
 * @param {number} x
 * @param {number} y
 */
export const onScalar = (x, y) => x >= AT.x && x <= AT.x + SIDE + 12 && y >= AT.y - 12 && y <= AT.y + SIDE;
