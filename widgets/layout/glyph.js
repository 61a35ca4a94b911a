// How an array is cut, in the size of a letter: cut lines in their axis' hue, a second sheet for copies elsewhere.

import { hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";
import { copies, cuts } from "../shared/mesh.js";

/** @import { Leaf } from "../shared/mesh.js" */

const [COLUMNS, ROWS] = [6, 4]; // pieces drawn at most

/**
 * 28 x 16 px.
 *
 * @param {Leaf} leaf
 */
export function glyph(leaf) {
  return s("svg", { width: 28, height: 16, "aria-hidden": "true" }, leaf.shape.length ? sheet(leaf) : dot());
}

const dot = () => s("circle", { cx: 13, cy: 8, r: 2.5, fill: "var(--jsm-ink-3)" });

/** @param {Leaf} leaf */
function sheet(leaf) {
  const copied = copies(leaf) > 1;
  const box = copied ? { x: 1.5, y: 4.5, width: 21, height: 10 } : { x: 1.5, y: 2.5, width: 23, height: 11 };
  const [right, low] = [box.x + box.width, box.y + box.height];
  const behind = `M${box.x + 3} ${box.y - 0.5}V${box.y - 3}H${right + 3}V${low - 3}H${right + 0.5}`;
  const frame = `M${box.x} ${box.y}h${box.width}v${box.height}h${-box.width}Z`;
  return [
    s("path", { d: copied ? frame + behind : frame, fill: "none", stroke: "var(--jsm-ink-3)" }),
    lines(leaf, box),
  ];
}

/**
 * The last cut dimension across, the one before it down; one that is cut alone and comes first is drawn down. All
 * lines of an axis are one path, so that a long list stays light.
 *
 * @param {Leaf} leaf
 * @param {{ x: number, y: number, width: number, height: number }} box
 */
function lines(leaf, box) {
  const pieces = cuts(leaf);
  const cut = pieces.flatMap((n, dim) => (n > 1 ? [dim] : []));
  const alone = cut.length === 1 && cut[0] === 0 && leaf.shape.length > 1;
  const [down, across] = alone ? [0, undefined] : [cut.at(-2), cut.at(-1)];
  const drawn = new Map();
  const draw = (
    /** @type {number | undefined} */ dim,
    /** @type {number} */ most,
    /** @type {(at: number) => string} */ path,
  ) => {
    if (dim === undefined) return;
    for (const [at, axis] of cutsOf(leaf, leaf.spec[dim], Math.min(pieces[dim], most))) {
      drawn.set(axis, (drawn.get(axis) ?? "") + path(at));
    }
  };
  draw(across, COLUMNS, (at) => `M${box.x + box.width * at} ${box.y}v${box.height}`);
  draw(down, ROWS, (at) => `M${box.x} ${box.y + box.height * at}h${box.width}`);
  return [...drawn].map(([axis, d]) => s("path", { d, stroke: hue(axis), "stroke-width": 1.4 }));
}

/**
 * Where `n` pieces are cut, as [fraction, axis]: the major axis cuts into its share of them, the minor the rest.
 *
 * @param {Leaf} leaf
 * @param {number[]} axes
 * @param {number} n
 */
function cutsOf(leaf, axes, n) {
  const inner = Math.max(1, Math.round(n / Math.min(n, leaf.sizes[axes[0]])));
  return Array.from({ length: n - 1 }, (_, i) => [(i + 1) / n, axes.length > 1 && (i + 1) % inner ? axes[1] : axes[0]]);
}
