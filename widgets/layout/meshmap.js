// The mesh as a picture: a cell for each device, the shown one filled, those with the same slice hatched, those that
// the array does not lie on faded.

import { replace, s, uniqueId } from "../shared/dom.js";
import { counted } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { blockOf, holders, lies } from "../shared/mesh.js";
import { area, corner, gridLines, ground, hatching, hostLines, numberSize, numbers, plates } from "./meshcells.js";
import { meshLabels } from "./meshlabels.js";
import { cellAt, cellOf, deviceIn, meshPlan, neighbour } from "./meshplan.js";

/** @type {Record<string, [down: number, across: number]>} */
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const SMALL = 10; // px of cells whose hatch is finer

/** @import { Leaf, Mesh } from "../shared/mesh.js" */
/** @import { Position } from "../shared/payload_types.js" */
/** @import { Selection } from "../shared/selection.js" */

/**
 * The map in `node`: `draw` makes it anew, `show` marks the selection's device and those with the same slice,
 * which touches a few elements whatever the mesh. Pointing at a cell points at its device, a click selects
 * it.
 */
export class MeshMap {
  /** @type {ReturnType<typeof meshPlan>} */
  #plan;
  /** @type {string | null} */
  #hatched = null; // the block, and its leaf, whose holders are hatched
  /** @type {string | null} */
  #faded = null; // the part of the mesh beside which cells are faded
  #hatch = uniqueId("hatch");
  #same = s("path", { class: "jsm-map-same", fill: `url(#${this.#hatch})` });
  #blanks = s("path", { class: "jsm-map-plate" });
  #beside = s("path", { class: "jsm-map-beside" });
  #cell = s("rect", {});
  #number = s("text", { "text-anchor": "middle" });

  /**
   * @param {Mesh} mesh
   * @param {Selection<any>} selection
   * @param {string} describedBy id of the text that tells what is shown
   */
  constructor(mesh, selection, describedBy) {
    this.mesh = mesh;
    this.selection = selection;
    this.node = s("svg", {
      class: "jsm-map",
      tabindex: 0,
      ...OWN_KEYS,
      role: "application",
      "aria-roledescription": "mesh",
      "aria-label": `Mesh of ${counted(mesh.count, "device")}. Arrow keys choose a device.`,
      "aria-describedby": describedBy,
      onpointermove: (event) => selection.point(this.#under(event)),
      onpointerleave: () => selection.point(null),
      onclick: (event) => this.#choose(this.#under(event)),
      onkeydown: (event) => this.#press(event),
    });
  }

  /**
   * Draw it at most this wide; returns its plan.
   *
   * @param {number} width
   */
  draw(width) {
    const { mesh, node } = this;
    const plan = meshPlan(mesh, width);
    this.#plan = plan;
    this.#hatched = this.#faded = null;
    node.setAttribute("width", String(plan.width));
    node.setAttribute("height", String(plan.height));
    node.classList.toggle("jsm-detail-dense", !plan.numbers);
    this.#number.setAttribute("style", numberSize(mesh, plan));
    replace(
      node,
      s("defs", {}, hatching(this.#hatch, Math.min(plan.cw, plan.ch) < SMALL)),
      s("path", { class: "jsm-map-cells", d: ground(plan) }),
      this.#same,
      this.#blanks,
      s("path", { class: "jsm-map-lines", d: gridLines(plan) }),
      s("path", { class: "jsm-map-frame", d: ground(plan) }),
      mesh.hosts.length > 0 && s("path", { class: "jsm-map-hosts", d: hostLines(mesh, plan) }),
      plan.numbers ? numbers(mesh, plan) : null,
      this.#beside,
      this.#cell,
      this.#number,
      meshLabels(mesh, plan),
    );
    return plan;
  }

  /**
   * Mark the selection's device and those that hold the same slice of `leaf`.
   *
   * @param {Leaf} leaf
   */
  show(leaf) {
    const position = this.selection.shown;
    this.#fade(leaf);
    this.#hatchHolders(leaf, position);
    for (const part of [this.#cell, this.#number]) {
      part.setAttribute("visibility", position === null ? "hidden" : "visible");
    }
    if (position !== null) this.#mark(position, lies(this.mesh, leaf, position));
  }

  /**
   * Fade the devices that hold nothing of `leaf`.
   *
   * @param {Leaf} leaf
   */
  #fade(leaf) {
    const { mesh } = this;
    const part = String(leaf.within);
    if (part === this.#faded) return;
    this.#faded = part;
    const beside = mesh.devices.flatMap((_, at) => (lies(mesh, leaf, at) ? [] : [cellOf(mesh, this.#plan, at)]));
    this.#beside.setAttribute("d", area(this.#plan, beside));
  }

  /**
   * Hatch all that hold what `position` holds; its own cell, filled, hides its hatch.
   *
   * @param {Leaf} leaf
   * @param {Position | null} position
   */
  #hatchHolders(leaf, position) {
    const { mesh } = this;
    const plan = this.#plan;
    const block = position === null ? null : blockOf(mesh, leaf, position);
    const state = `${leaf.index} ${block}`;
    if (state === this.#hatched) return;
    this.#hatched = state;
    const cells =
      position === null || block === null ? [] : holders(mesh, leaf, position).map((at) => cellOf(mesh, plan, at));
    this.#same.setAttribute("d", area(plan, cells));
    this.#blanks.setAttribute("d", plan.numbers ? plates(mesh, plan, cells) : "");
  }

  /**
   * The device at `position` filled, one that holds nothing as an outline.
   *
   * @param {Position} position
   * @param {boolean} holds
   */
  #mark(position, holds) {
    this.#cell.setAttribute("class", holds ? "jsm-detail-shown" : "jsm-map-empty");
    this.#number.setAttribute("class", `jsm-mark jsm-mono ${holds ? "jsm-detail-on-shown" : "jsm-ink"}`);
    const { cw, ch, numbers: numbered } = this.#plan;
    const [x, y] = corner(this.#plan, ...cellOf(this.mesh, this.#plan, position));
    const grown = numbered ? 0 : 0.5; // in a map of small cells it stands out
    const box = { x: x - grown, y: y - grown, width: cw + 2 * grown, height: ch + 2 * grown };
    for (const [name, value] of Object.entries(box)) this.#cell.setAttribute(name, String(value));
    this.#number.setAttribute("x", String(x + cw / 2));
    this.#number.setAttribute("y", String(y + ch / 2 + 3.5));
    this.#number.textContent = numbered ? String(this.mesh.devices[position]) : "";
  }

  /**
   * The position of the device under the pointer, null for none.
   *
   * @param {MouseEvent} event
   */
  #under(event) {
    const box = this.node.getBoundingClientRect();
    const { down, across, rows, columns, ch, cw, gap, x, y } = this.#plan;
    const row = cellAt(down, rows, ch, gap, event.clientY - box.top - y);
    const column = cellAt(across, columns, cw, gap, event.clientX - box.left - x);
    return row === null || column === null ? null : deviceIn(this.mesh, this.#plan, row, column);
  }

  /** @param {Position | null} position */
  #choose(position) {
    if (position !== null) this.selection.select({ device: position });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const step = ARROWS[event.key];
    if (!step && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    const { selection } = this;
    const from = selection.device;
    if (from === null) this.#choose(selection.pointed ?? 0);
    else if (step) this.#choose(neighbour(this.mesh, this.#plan, from, ...step));
    selection.point(null);
  }
}
