// Below the picture of an array: what runs across, what down, and how it is cut.

import { axisClass } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { placed } from "../shared/text.js";

/** Where an array lies that is not on the whole mesh: `on pipe=2 only`. */
export const alone = (mesh, leaf) => (leaf.within.length ? h("div", {}, placed(mesh, [leaf.within]), " only") : null);

/** A line for each drawn dimension: `→ dim 3: 768 = 4 × 192 data`. */
export function captions(mesh, leaf, { column, row, panels, pieces }) {
  const lines = [["→", column], ["↓", row], ...panels.map((dim) => ["panels", dim])];
  return lines
    .filter(([, dim]) => dim !== null)
    .map(([mark, dim]) => {
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

function cutText(size, pieces) {
  if (pieces === 1) return `${size} whole`;
  return size % pieces
    ? `${size} in ${pieces} parts, ${Math.ceil(size / pieces)} at most`
    : `${size} = ${pieces} × ${size / pieces}`;
}
