// An array as a picture of its blocks: cut lines in the hue of their axis, the shown device's block filled.

import { h, replace, s } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { blockOf, holders, lies } from "../shared/mesh.js";
import {
  blockBox,
  cuttingLines,
  ground,
  holderText,
  offsetTexts,
  outlines,
  panelText,
  sheets,
  titles,
} from "./blockshapes.js";
import { alone, captions } from "./captions.js";
import { framed, under } from "./frames.js";
import { pager } from "./pager.js";
import { blockAt, holderOf, holderTexts, holds, LEAST_NUMBER, moved, panelOf } from "./plan.js";
import { onScalar, scalar } from "./scalar.js";

/** @type {Record<string, number[]>} */
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** @type {Record<string, number>} */
const PAGES = { PageUp: -1, PageDown: 1 };
const LEAST_MARK = 2; // px: a smaller block is marked as if it were as large
const DENSE = 4; // px: lines closer than this would hide a mark below them

/** @import { Frame } from "./frames.js" */
/** @import { Position } from "../shared/payload_types.js" */
/** @import { Leaf, Mesh } from "../shared/mesh.js" */
/** @import { Selected, Selection } from "../shared/selection.js" */
/** @import { Changed } from "../shared/store.js" */
/** @import { Framed } from "./frames.js" */

/**
 * The picture in `node`: `draw` makes it anew, `show` marks the block of the selection's device, which touches
 * a few elements however many blocks there are. Pointing at a block points at a device that holds it, a click
 * selects that device, further clicks the next ones that hold the same.
 */
export class Blocks {
  /** @type {Leaf} */
  #leaf;
  /** @type {Framed} */
  #picture;
  /** @type {ReturnType<typeof scalar> | null} */
  #flat = null; // the picture of a leaf without dimensions
  #panel = 0; // the one on show where there is room for one alone
  /** @type {number | null} */
  #browsed = null; // the panel that the buttons chose
  #marked = s("g", {});
  #numbers = s("g", {});
  #captions = h("div", { class: "jsm-detail-dims" });
  #pager = pager((step) => this.#turn(step));

  /**
   * @param {Mesh} mesh
   * @param {Selection<any>} selection
   * @param {string} describedBy id of the text that tells what is shown
   */
  constructor(mesh, selection, describedBy) {
    this.mesh = mesh;
    this.selection = selection;
    /** @type {SVGSVGElement} */
    this.svg = s("svg", {
      class: "jsm-blocks",
      tabindex: 0,
      ...OWN_KEYS,
      role: "application",
      "aria-roledescription": "array",
      "aria-describedby": describedBy,
      onpointermove: (event) => selection.point(this.#pointedAt(this.#under(event))),
      onpointerleave: () => selection.point(null),
      onclick: (event) => this.#choose(this.#under(event), true),
      onkeydown: (event) => this.#press(event),
    });
    this.node = h("div", { class: "jsm-array" }, this.#pager.node, this.svg, this.#captions);
  }

  /**
   * Draw `leaf` this wide with its frames from `top` px (at least) on; returns the height.
   *
   * @param {Leaf} leaf
   * @param {number} width
   * @param {number} top
   */
  draw(leaf, width, top) {
    const { mesh, svg } = this;
    if (leaf.index !== this.#leaf?.index) this.#browsed = null;
    this.#leaf = leaf;
    this.#picture = framed(leaf, width, top);
    const { frames, paged, panels, plan } = this.#picture;
    this.#flat = frames.length ? null : scalar(leaf);
    const height = this.#flat?.height ?? this.#picture.height;
    this.node.style.width = `${width}px`;
    for (const [name, value] of Object.entries({ width, height, "aria-label": this.#spoken() })) {
      svg.setAttribute(name, String(value));
    }
    replace(svg, this.#flat ? [this.#flat.parts, this.#marked] : this.#layers());
    replace(this.#captions, this.#flat ? "no dimension to cut" : captions(mesh, leaf, plan), alone(mesh, leaf));
    this.#captions.style.paddingLeft = `${this.#flat?.box.x ?? frames[0].x}px`;
    this.#pager.node.hidden = !paged;
    if (paged) this.#pager.reserve(panels, this.#textOf(panels - 1).join(", "));
    this.#panel = this.#wanted();
    this.#write();
    this.#mark();
    return height;
  }

  /**
   * Mark what the selection shows now; `changed` names what changed in it.
   *
   * @param {Changed<Selected>} changed
   */
  show(changed) {
    if (changed.device) this.#browsed = null;
    const panel = this.#wanted();
    if (panel !== this.#panel) {
      this.#panel = panel;
      this.#write();
    }
    this.#mark();
  }

  /** A mark lies under the cut lines, but over lines that are so dense that they would hide it. */
  #layers() {
    const [leaf, picture] = [this.#leaf, this.#picture];
    const { dims, frames, w, h: high } = picture;
    const lines = cuttingLines(leaf, picture);
    const dense = w / (dims.column?.pieces ?? 1) < DENSE || high / (dims.row?.pieces ?? 1) < DENSE;
    return [
      sheets(leaf, picture),
      ground(picture),
      this.#numbers,
      dense ? [lines, this.#marked] : [this.#marked, lines],
      outlines(picture),
      offsetTexts(picture),
      frames.length > 1
        ? titles(
            picture,
            frames.map((frame) => this.#textOf(frame.panel)),
          )
        : [],
    ];
  }

  /** @param {number} panel */
  #textOf(panel) {
    return panelText(this.#leaf, this.#picture.plan, blockAt(this.#picture.plan, panel, 0, 0));
  }

  /** @param {{ panel: number }} frame */
  #panelOf(frame) {
    return this.#picture.paged ? this.#panel : frame.panel;
  }

  /** The panel to show: of the device under the pointer, of the buttons, of the chosen device. */
  #wanted() {
    if (!this.#picture.paged) return 0;
    const at = this.selection.pointed ?? (this.#browsed === null ? this.selection.device : null);
    const block = at === null ? null : blockOf(this.mesh, this.#leaf, at);
    return block === null ? (this.#browsed ?? 0) : panelOf(this.#picture.plan, block);
  }

  /** @param {number} step */
  #turn(step) {
    const { panels } = this.#picture;
    this.#browsed = (this.#panel + step + panels) % panels;
    this.show({});
  }

  /** The numbers in the blocks, where they fit, and which panel it is. */
  #write() {
    const picture = this.#picture;
    const { frames, dims, w, h: high, paged, plan, panels } = picture;
    if (paged) this.#pager.set(this.#panel, panels, this.#textOf(this.#panel).join(", "));
    const [columns, rows] = [dims.column?.pieces ?? 1, dims.row?.pieces ?? 1];
    const fits = w / columns >= LEAST_NUMBER && high / rows >= LEAST_NUMBER;
    const texts = frames.flatMap((frame) =>
      Array.from({ length: fits ? rows * columns : 0 }, (_, i) => {
        const [down, across] = [Math.floor(i / columns), i % columns];
        const block = blockAt(plan, this.#panelOf(frame), down, across);
        return holderText(holderTexts(this.mesh, this.#leaf, block), blockBox(picture, frame, down, across));
      }),
    );
    replace(this.#numbers, texts);
  }

  #mark() {
    const position = this.selection.shown;
    if (this.#flat) replace(this.#marked, this.#flat.mark(position !== null && lies(this.mesh, this.#leaf, position)));
    else replace(this.#marked, position === null ? [] : this.#markOf(position));
  }

  /** @param {Position} position */
  #markOf(position) {
    const { plan, frames } = this.#picture;
    const block = blockOf(this.mesh, this.#leaf, position);
    if (block === null) return [];
    const frame = frames.find((f) => this.#panelOf(f) === panelOf(plan, block));
    if (!frame) return [];
    const box = blockBox(this.#picture, frame, block[plan.row ?? -1] ?? 0, block[plan.column ?? -1] ?? 0);
    const ids = holderTexts(this.mesh, this.#leaf, block);
    const text = holderText(ids, box, String(this.mesh.devices[position]));
    return [s("rect", { class: "jsm-detail-shown", ...atLeast(box, LEAST_MARK) }), text];
  }

  /**
   * The block under the pointer, null for none.
   *
   * @param {MouseEvent} event
   */
  #under(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (this.#flat) return onScalar(x, y) ? [] : null;
    const at = under(this.#picture, x, y);
    return at && blockAt(this.#picture.plan, this.#panelOf(at), at.down, at.across);
  }

  /**
   * The chosen device if it holds `block`, else the first that does.
   *
   * @param {number[] | null} block
   */
  #pointedAt(block) {
    if (block === null) return null;
    const { device } = this.selection;
    return holds(this.mesh, this.#leaf, device, block) ? device : holderOf(this.mesh, this.#leaf, block);
  }

  /**
   * Select a holder of `block`: the first, and each time the next one.
   *
   * @param {number[] | null} block
   */
  #choose(block, pointing = false) {
    if (block === null) return;
    const all = holders(this.mesh, this.#leaf, holderOf(this.mesh, this.#leaf, block));
    const device = all[(all.indexOf(this.selection.device) + 1) % all.length];
    this.selection.select({ device });
    this.selection.point(pointing ? device : null);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const { mesh, selection } = this;
    const { plan, panels, paged } = this.#picture;
    const choosing = event.key === "Enter" || event.key === " ";
    if (!choosing && !(event.key in ARROWS) && !(event.key in PAGES && panels > 1)) return;
    event.preventDefault();
    const { device } = selection;
    const block = device === null ? null : blockOf(mesh, this.#leaf, device);
    if (block === null) return this.#choose(blockAt(plan, this.#panel, 0, 0));
    if (choosing) return this.#choose(block);
    const from = paged ? this.#panel : panelOf(plan, block);
    const to = moved(plan, block, from, ARROWS[event.key] ?? [0, 0], PAGES[event.key] ?? 0);
    this.#browsed = null;
    selection.point(null);
    selection.select({ device: holderOf(mesh, this.#leaf, to, device ?? 0) });
    this.show({});
  }

  #spoken() {
    const { plan, panels } = this.#picture;
    const { path, shape } = this.#leaf;
    const total = plan.pieces.reduce((a, b) => a * b, 1);
    const size = this.#flat ? "one value" : `${shape.join(" by ")} in ${total} block${total === 1 ? "" : "s"}`;
    const keys = panels > 1 ? "Arrow and page keys move" : "Arrow keys move";
    return `${path}: ${size}. ${keys}, Enter takes the next device that holds the same.`;
  }
}

/**
 * A rectangle around the middle of `box`, grown to `least` where it is smaller.
 *
 * @param {ReturnType<typeof blockBox>} box
 * @param {number} least
 */
function atLeast(box, least) {
  const [width, height] = [Math.max(box.width, least), Math.max(box.height, least)];
  return { x: box.x - (width - box.width) / 2, y: box.y - (height - box.height) / 2, width, height };
}
