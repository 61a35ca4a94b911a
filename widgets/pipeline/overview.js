// All of the time at once, above lanes that show a part of it: a frame to drag.

import { h } from "../shared/dom.js";
import { brush } from "./colours.js";
import { fillColumns, sharesOf } from "./columns.js";

/** @import { Palette } from "./colours.js" */
/** @import { Events } from "./events.js" */
/** @import { Plan } from "./plan.js" */
/** @import { Span } from "./span.js" */

const ROWS = [
  [16, 6],
  [32, 4],
]; // px of a rank, by how many there are at most
const LEAST = 2; // px where there are more

export class Overview {
  #events;
  #plan;
  #span;
  #changed;
  #canvas = h("canvas", { "aria-hidden": "true" });
  #frame = h("div", { class: "jsm-pp-frame" });
  #box;
  #row;
  /** @type {number | null} */
  #grip = null;

  /**
   * `changed()` is called when the frame was moved, which moves `span`.
   *
   * @param {Events} events
   * @param {Plan} plan
   * @param {Span} span
   * @param {() => void} changed
   */
  constructor(events, plan, span, changed) {
    this.#events = events;
    this.#plan = plan;
    this.#span = span;
    this.#changed = changed;
    this.#row = ROWS.find(([ranks]) => plan.ranks <= ranks)?.[1] ?? LEAST;
    this.#box = h(
      "div",
      {
        class: "jsm-pp-all",
        title: "The whole time; drag the frame",
        style: { height: `${this.#row * plan.ranks}px` },
        onpointerdown: (event) => this.#down(event),
        onpointermove: (event) => this.#grip !== null && this.#to(event, this.#grip),
        onpointerup: () => (this.#grip = null),
        onpointercancel: () => (this.#grip = null),
      },
      this.#canvas,
      this.#frame,
    );
    this.element = h("div", { class: "jsm-pp-overview" }, this.#box);
  }

  /**
   * Lie above the lanes of `plot`, in `colours`.
   *
   * @param {HTMLElement} plot
   * @param {Palette} colours
   */
  fit(plot, colours) {
    const ratio = globalThis.devicePixelRatio || 1;
    const [width, height] = [plot.clientWidth, this.#row * this.#plan.ranks];
    [this.#box.style.marginLeft, this.#box.style.width] = [`${plot.offsetLeft}px`, `${width}px`];
    const { style } = this.#canvas;
    [this.#canvas.width, this.#canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    [style.width, style.height] = [`${width}px`, `${height}px`];
    const context = brush(this.#canvas);
    const full = Math.round(this.#row * ratio);
    const tall = full > 3 ? full - 1 : full;
    for (let rank = 0; rank < this.#plan.ranks; rank += 1) {
      const lane = this.#events.lanes[rank];
      const shares = sharesOf(lane, lane.start, lane.end, 0, this.#events.end, this.#canvas.width);
      const bytes = { ...colours.bytes, hatch: colours.bytes.bg };
      fillColumns(context, shares, Math.round(rank * this.#row * ratio), tall, bytes);
    }
    this.mark();
  }

  mark() {
    const { from, length, end } = this.#span;
    this.#frame.style.left = `${(100 * from) / end}%`;
    this.#frame.style.width = `${(100 * length) / end}%`;
  }

  /** @param {MouseEvent} event */
  #at(event) {
    const box = this.#box.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.#span.end;
  }

  /**
   * Hold the frame where it was taken; outside of it, move its middle there first.
   *
   * @param {PointerEvent} event
   */
  #down(event) {
    if (event.button !== 0) return;
    event.preventDefault();
    this.#box.setPointerCapture(event.pointerId);
    const at = this.#at(event);
    const inside = at >= this.#span.from && at <= this.#span.to;
    const grip = inside ? at - this.#span.from : this.#span.length / 2;
    this.#grip = grip;
    this.#to(event, grip);
  }

  /**
   * @param {PointerEvent} event
   * @param {number} grip
   */
  #to(event, grip) {
    this.#span.set(this.#at(event) - grip, this.#span.length);
    this.#changed();
  }
}
