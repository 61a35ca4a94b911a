// The array beside the mesh, and what the shown device holds of it: the drawings of a report's layout.

import { Blocks } from "../layout/blocks.js";
import { MeshMap } from "../layout/meshmap.js";
import { readout } from "../layout/readout.js";
import { h, replace, uniqueId } from "../shared/dom.js";
import { counted } from "../shared/format.js";

const WIDTH = 372; // px, until it is known
const GAP = 20;
const TOP = 36; // px above the frames of array and mesh where they stand side by side
const HIGHEST = 300; // px of an array beside the mesh

/** @import { Leaf } from "../shared/mesh.js" */
/** @import { Selected } from "../shared/selection.js" */
/** @import { Changed } from "../shared/store.js" */
/** @import { Trial } from "./trial.js" */
/** @import { Worked } from "./worked.js" */

/**
 * `{element, draw(work, leaf), show(changed)}`.
 *
 * @param {Trial} trial
 */
export function pictures(trial) {
  const reading = uniqueId("holds");
  const drawn = h("div", { class: "jsm-pictures jsm-ex-pictures" });
  const said = h("div", { class: "jsm-detail-text" });
  const why = h("div", { class: "jsm-small jsm-quiet jsm-ex-why" });
  const element = h("div", { class: "jsm-ex-side" }, drawn, said, why);
  /** @type {ReturnType<typeof readout>} */
  let read;
  /** @type {Blocks} */
  let array;
  /** @type {MeshMap | undefined} */
  let map;
  /** @type {string} */
  let mesh;
  /** @type {Leaf} */
  let leaf;
  /** @type {ReturnType<MeshMap["draw"]>} */
  let plan;
  let width = WIDTH;

  /**
   * @param {Worked} work
   * @param {number} index
   */
  function draw(work, index) {
    const drawnOf = JSON.stringify([work.view.mesh.axes, work.mesh.devices]);
    if (drawnOf !== mesh) {
      mesh = drawnOf;
      read = readout(work.mesh, reading);
      array = new Blocks(work.mesh, trial, reading);
      map = new MeshMap(work.mesh, trial, reading);
      map.node.dataset.k = "mesh";
      array.svg.dataset.k = "blocks";
      map.node.setAttribute("aria-label", `Mesh of ${counted(work.mesh.count, "device")}. Arrow keys choose a device.`);
      plan = map.draw(width);
      replace(drawn, array.node, map.node);
      replace(said, read.node);
    }
    leaf = work.leaf(index);
    read.draw(leaf);
    read.show(leaf, trial.shown);
    replace(why, leaf.why);
    drawArray();
  }

  function drawArray() {
    const high = plan.beside ? array.draw(leaf, width - plan.width - GAP, TOP) : Infinity;
    if (high > HIGHEST) array.draw(leaf, width, 0);
    map?.show(leaf);
  }

  /** @param {Changed<Selected>} changed */
  function show(changed) {
    array.show(changed);
    map?.show(leaf);
    read.show(leaf, trial.shown);
  }

  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(Math.min(contentRect.width, WIDTH * 1.4));
    if (now === 0 || now === width || !map) return;
    width = now;
    plan = map.draw(width);
    drawArray();
  }).observe(drawn);
  return { element, draw, show };
}
