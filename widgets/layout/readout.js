// What the shown device holds of an array, in three lines that take the same room for every device.

import { h, replace } from "../shared/dom.js";
import { bytes, count } from "../shared/format.js";
import { copies, holders, lies, places, sliceOf, sliceText } from "../shared/mesh.js";
import { axis, placed } from "../shared/text.js";
import { heldAt } from "./plan.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Leaf } from "../shared/mesh.js" */
/** @import { Mesh } from "../shared/mesh.js" */

const MOST_NAMED = 6;

/**
 * `{node, draw(leaf), show(leaf, position)}`; the text is read aloud when it changes.
 *
 * @param {Mesh} mesh
 * @param {string} id
 */
export function readout(mesh, id) {
  const space = h("div", { class: "jsm-detail-space", "aria-hidden": "true" });
  const said = h("div", { id, "aria-live": "polite" });
  const widest = Math.max(...mesh.devices);
  return {
    node: h("div", { class: "jsm-detail-read jsm-detail-stack" }, space, said),
    draw: (/** @type {Leaf} */ leaf) =>
      replace(
        space,
        lines(mesh, leaf, places(mesh, leaf).at(-1) ?? 0, () => widest),
      ),
    show(/** @type {Leaf} */ leaf, /** @type {Sent.Position | null} */ position) {
      const hint = h("div", { class: "jsm-quiet" }, "Point at a block or a device to see what it holds.");
      replace(said, position === null ? hint : lines(mesh, leaf, position, (at) => mesh.devices[at]));
    },
  };
}

/**
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 * @param {(position: Sent.Position) => number} idOf
 */
function lines(mesh, leaf, position, idOf) {
  const coords = mesh.coords(position);
  const axes = mesh.names.map((_, i) => i).filter((i) => mesh.sizes[i] > 1);
  const at = axes.map((i, n) => [n ? ", " : " ", axis(mesh, i), ` ${coords[i]}`]);
  const host = mesh.hosts.length ? `, host ${mesh.hosts[position]}` : "";
  const device = [h("b", {}, `device ${idOf(position)}`), at, host];
  if (!lies(mesh, leaf, position)) {
    return [
      h("div", {}, device, " holds nothing of it"),
      h("div", { class: "jsm-quiet" }, "it lies ", placed(mesh, [leaf.within]), " only"),
    ];
  }
  return [
    h("div", {}, device, ` holds ${bytes(heldAt(mesh, leaf, position))}`),
    h("div", { class: "jsm-mono" }, sliceText(sliceOf(mesh, leaf, position))),
    h("div", { class: "jsm-quiet" }, sameOn(mesh, leaf, position, idOf)),
  ];
}

/**
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 * @param {(position: Sent.Position) => number} idOf
 */
function sameOn(mesh, leaf, position, idOf) {
  const others = copies(leaf) - 1;
  if (others > MOST_NAMED) return `the same slice is on ${count(others)} more devices`;
  const named = holders(mesh, leaf, position).filter((other) => other !== position);
  if (!named.length) return mesh.count === 1 ? "the only device" : "no other device holds this slice";
  return `the same slice is on device${named.length > 1 ? "s" : ""} ${named.map(idOf).join(", ")}`;
}
