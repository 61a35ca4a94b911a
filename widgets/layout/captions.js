// Below the picture of an array: what runs across, what down, and how it is cut.

import { axisClass } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { placed } from "../shared/text.js";

/** @import { Arranged } from "./plan.js" */
/** @import { Leaf, Mesh } from "../shared/mesh.js" */

/**
 * Where an array lies that is not on the whole mesh: `on pipe=2 only`.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
export const alone = (mesh, leaf) => (leaf.within.length ? h("div", {}, placed(mesh, [leaf.within]), " only") : null);

/**
 * A line for each drawn dimension: `→ dim 3: 768 = 4 × 192 data`.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Arranged} plan
 */
export function captions(mesh, leaf, { column, row, panels, pieces }) {
  const lines = [
    { mark: "→", dim: column },
    { mark: "↓", dim: row },
    ...panels.map((dim) => ({ mark: "panels", dim })),
  ];
  return lines.flatMap(({ mark, dim }) => {
    if (dim === null) return [];
    const axes = leaf.spec[dim].filter((axis) => leaf.sizes[axis] > 1);
    const names = axes.map((axis) => [" ", h("b", { class: axisClass(axis) }, mesh.names[axis])]);
    const size = leaf.shape[dim];
    return h(
      "div",
      {},
      mark,
      h("span", { class: "jsm-detail-dim" }, ` dim ${dim}: `),
      cutText(size, pieces[dim]),
      names,
    );
  });
}

/**
 * @param {number} size
 * @param {number} pieces
 */
function cutText(size, pieces) {
  if (pieces === 1) return `${size} whole`;
  return size % pieces
    ? `${size} in ${pieces} parts, ${Math.ceil(size / pieces)} at most`
    : `${size} = ${pieces} × ${size / pieces}`;
}
