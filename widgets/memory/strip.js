// Every device's peak in one line, fullest first: where the bars leave off.

import { h, replace, s, uniqueId } from "../shared/dom.js";
import { bytes, count } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Scale } from "./scale.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

const [HEIGHT, TOP, BOTTOM] = [64, 8, 4]; // px
const LABEL = 64; // px at the left of the line
const LEAP = 16; // steps of Page Up and Page Down from end to end

/** The strip in `strip.element`: `draw(plan)` makes it anew, `mark()` follows the selection. */
export class Strip {
  #memory;
  #mesh;
  #selection;
  #order; // positions, fullest first; those whose peak is not known are left out
  /** @type {Map<Sent.Position | null, number>} */
  #place; // of each position in that order
  #span = [0, 1]; // px at which the line begins and ends
  #cursor = s("path", { class: "jsm-mem-strip-cursor" });
  #chosen = s("path", { class: "jsm-mem-strip-chosen" });
  #said = h("p", { class: "jsm-mark-text jsm-quiet" });
  #plot;

  /**
   * @param {Sent.Memory} memory
   * @param {Mesh} mesh
   * @param {Selection} selection
   */
  constructor(memory, mesh, selection) {
    this.#memory = memory;
    this.#mesh = mesh;
    this.#selection = selection;
    const { peak } = memory.devices;
    this.#order = peak
      .flatMap((size, i) => (size === null ? [] : [i]))
      .sort((a, b) => (peak[b] ?? 0) - (peak[a] ?? 0) || a - b);
    this.#place = new Map(this.#order.map((position, i) => [position, i]));
    this.#plot = h("div", {
      class: "jsm-mem-strip-plot",
      ...OWN_KEYS,
      role: "slider",
      tabindex: 0,
      "aria-label": "Peak memory of every device, fullest first. Arrow keys move, Enter chooses.",
      "aria-valuemin": 1,
      "aria-valuemax": this.#order.length,
      onpointermove: (event) => this.#point(event),
      onpointerleave: () => this.#selection.point(null),
      onclick: (event) => this.#choose(this.#under(event)),
      onkeydown: (event) => this.#press(event),
      onblur: () => this.#selection.point(null),
    });
    this.element = h("div", { class: "jsm-mem-strip" }, this.#plot, this.#said);
  }

  /** @param {Scale} plan */
  draw({ width, x0, x1 }) {
    const { devices, limit_text: text, scale_note: own } = this.#memory;
    const limit = own === null ? this.#memory.limit : null;
    const fullest = devices.peak[this.#order[0]] ?? 0;
    const most = Math.max(1, limit ?? 0, fullest);
    const [left, bottom] = [Math.max(x0, LABEL), TOP + HEIGHT];
    this.#span = [left, x1];
    const y = (/** @type {number} */ size) => bottom - (HEIGHT * size) / most;
    const line = this.#line(y);
    const area = `${line}V${bottom}H${left}Z`;
    const label = (/** @type {number} */ at, /** @type {string | null} */ said, more = "") =>
      s("text", { x: left - 8, y: at, "text-anchor": "end", class: `jsm-mark ${more}` }, said);
    replace(
      this.#plot,
      s(
        "svg",
        { width, height: bottom + BOTTOM, "aria-hidden": "true" },
        s("path", { d: area, class: "jsm-mem-strip-area" }),
        limit !== null && fullest > limit ? tooMuch(area, left, x1, y(limit)) : null,
        s("path", { d: line, class: "jsm-mem-strip-line" }),
        limit === null ? null : s("path", { d: `M${left} ${y(limit)}H${x1}`, class: "jsm-limit-line" }),
        limit === null ? label(y(most) + 4, bytes(most)) : label(y(limit) + 4, text, "jsm-limit"),
        label(bottom, "0"),
        this.#chosen,
        this.#cursor,
      ),
    );
    this.#said.style.width = `${x1}px`;
    this.mark();
  }

  /**
   * The peaks as steps; devices that hold the same to a tenth of a pixel are one.
   *
   * @param {(size: number) => number} y
   */
  #line(y) {
    const { peak } = this.#memory.devices;
    let line = "";
    /** @type {number | null} */
    let last = null;
    this.#order.forEach((position, i) => {
      const at = Math.round(10 * y(peak[position] ?? 0)) / 10;
      if (at !== last) line += last === null ? `M${this.#x(0)} ${at}` : `H${this.#x(i).toFixed(1)}V${at}`;
      last = at;
    });
    return `${line}H${this.#x(this.#order.length)}`;
  }

  /** @param {number} i */
  #x(i) {
    const [from, to] = this.#span;
    return from + ((to - from) * i) / this.#order.length;
  }

  /** Show where the chosen device stands, and the one that is pointed at. */
  mark() {
    const { device, pointed, shown } = this.#selection;
    this.#upright(this.#chosen, device);
    this.#upright(this.#cursor, pointed);
    const at = this.#place.get(shown);
    const [n, all] = [this.#order.length, this.#mesh.count];
    const said = at === undefined ? null : this.#told(at);
    this.#said.textContent = said ?? `${count(n)}${n < all ? ` of ${count(all)}` : ""} devices, fullest first`;
    this.#plot.setAttribute("aria-valuenow", String((at ?? 0) + 1));
    this.#plot.setAttribute("aria-valuetext", said ?? this.#told(0));
  }

  /**
   * @param {SVGPathElement} path
   * @param {Sent.Position | null} position
   */
  #upright(path, position) {
    const at = this.#place.get(position);
    const x = at === undefined ? null : (this.#x(at) + this.#x(at + 1)) / 2;
    path.setAttribute("d", x === null ? "" : `M${x.toFixed(1)} ${TOP - 4}V${TOP + HEIGHT}`);
  }

  /** @param {number} at */
  #told(at) {
    const position = this.#order[at];
    const place = `${count(at + 1)} of ${count(this.#order.length)}, fullest first`;
    return `device ${this.#mesh.devices[position]}: ${bytes(this.#memory.devices.peak[position])}, ${place}`;
  }

  /** @param {MouseEvent} event */
  #under(event) {
    const [from, to] = this.#span;
    const x = event.clientX - this.#plot.getBoundingClientRect().left;
    const at = Math.floor(((x - from) / (to - from)) * this.#order.length);
    return this.#order[Math.max(0, Math.min(this.#order.length - 1, at))];
  }

  /** @param {MouseEvent} event */
  #point(event) {
    this.#selection.point(this.#under(event));
  }

  /** @param {Sent.Position} position */
  #choose(position) {
    this.#selection.select({ device: position });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const last = this.#order.length - 1;
    const at = this.#place.get(this.#selection.shown) ?? -1;
    const leap = Math.max(1, Math.round(last / LEAP));
    /** @type {Record<string, number>} */
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: leap, PageUp: -leap };
    const to = { Home: 0, End: last }[event.key] ?? at + (steps[event.key] ?? NaN);
    if (!Number.isNaN(to)) this.#selection.point(this.#order[Math.max(0, Math.min(last, to))]);
    else if (event.key === "Enter" || event.key === " ") this.#choose(this.#order[Math.max(0, at)]);
    else return;
    event.preventDefault();
  }
}

/**
 * The part of `area` above the limit, which lies at `y`.
 *
 * @param {string} area
 * @param {number} left
 * @param {number} right
 * @param {number} y
 */
function tooMuch(area, left, right, y) {
  const id = uniqueId("over");
  return [
    s("clipPath", { id }, s("rect", { x: left, y: 0, width: right - left, height: y })),
    s("path", { d: area, class: "jsm-mem-strip-over", "clip-path": `url(#${id})` }),
  ];
}
