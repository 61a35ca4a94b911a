// The chosen array: its type, its blocks beside the mesh, what the shown device holds, its sizes.

import { h, replace, uniqueId } from "../shared/dom.js";
import { leafAt } from "../shared/mesh.js";
import { copyable, placed, specText, typed } from "../shared/text.js";
import { Blocks } from "./blocks.js";
import { facts, notes } from "./facts.js";
import { MeshMap } from "./meshmap.js";
import { readout } from "./readout.js";
import { defaultLeaf } from "./rows.js";

const WIDTH = 364; // px, until it is known
const GAP = 22;
const TOP = 36; // px above the frames of blocks and mesh where they stand side by side
const HIGHEST = 300; // px of an array beside the mesh

/** @import { Leaf, Mesh } from "../shared/mesh.js" */
/** @import { Report } from "../shared/payload_types.js" */
/** @import { Selected, Selection } from "../shared/selection.js" */
/** @import { Changed } from "../shared/store.js" */

/**
 * The array that `selection` shows; pointing at a block or a device shows what that device holds.
 *
 * @param {Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
export function detail(data, mesh, selection) {
  if (!data.leaves.path.length) return h("div", {});
  const reading = uniqueId("holds");
  const read = readout(mesh, reading);
  const array = new Blocks(mesh, selection, reading);
  const map = new MeshMap(mesh, selection, reading);
  const head = h("div", { class: "jsm-detail-head" });
  const below = h("div", { class: "jsm-detail-notes" });
  const pictures = h("div", { class: "jsm-pictures" }, array.node, map.node);
  /** @type {Leaf} */
  let leaf;
  let width = WIDTH;
  let plan = map.draw(width);

  /** The array beside the mesh, or above it where it takes the whole width or would get too high. */
  function drawArray() {
    const high = plan.beside ? array.draw(leaf, width - plan.width - GAP, TOP) : Infinity;
    if (high > HIGHEST) array.draw(leaf, width, 0);
    map.show(leaf);
  }

  function draw() {
    leaf = leafAt(data, selection.leaf ?? defaultLeaf(data) ?? 0);
    replace(
      head,
      h("h3", { class: "jsm-mono jsm-detail-path" }, leaf.path),
      h("div", {}, typed(mesh, leaf), " ", placed(mesh, [leaf.within])),
      h("div", {}, copyable(specText(mesh, leaf))),
    );
    replace(below, notes(data, mesh, leaf), facts(mesh, leaf));
    read.draw(leaf);
    read.show(leaf, selection.shown);
    drawArray();
  }

  /** @param {Changed<Selected>} changed */
  function show(changed) {
    array.show(changed);
    map.show(leaf);
    read.show(leaf, selection.shown);
  }

  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(contentRect.width);
    if (now === 0 || now === width) return;
    width = now;
    plan = map.draw(width);
    drawArray();
  }).observe(pictures);
  selection.on((changed) => {
    if (changed.leaf) draw();
    else if (changed.device || changed.pointed) show(changed);
  });
  draw();
  return h(
    "div",
    { class: "jsm-detail" },
    head,
    h("div", { class: "jsm-detail-body" }, pictures, h("div", { class: "jsm-detail-text" }, read.node, below)),
  );
}
