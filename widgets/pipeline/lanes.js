// The timeline: names at the left, lanes on a canvas, bubbles at the right; pointed at, dragged, and moved by keys.

import { h } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { palette } from "./colours.js";
import { Overview } from "./overview.js";
import { Painter } from "./painter.js";
import { planOf, roomOf, WRITTEN } from "./plan.js";
import { Span } from "./span.js";
import { spoken, Tip, told, toldHeld, toldIdle } from "./tip.js";

const SEEN = 6; // px of an action
const CLICK = 3; // px that the pointer may move in a click
const WHEEL = 0.002; // of a wheel's px, as a power of e
const PAN = 0.15; // of the time on show, by a key
const HELP =
  "Arrow keys move between actions, Enter marks a microbatch, plus and minus zoom, 0 shows all, Shift with arrows moves along";
const HELP_LINES = HELP.replace("actions", "pieces").replace("a microbatch", "a line");
const HELD =
  "The most activations held at once, one for each microbatch of each stage: from its forward action until its" +
  " weight gradient has been computed";

/** @import { Place } from "./events.js" */
/** @import { Plan } from "./plan.js" */
/** @import { Line } from "./tip.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Events } from "./events.js" */
/** @typedef {{ x: number, from: number, moved: boolean }} Drag */
/** @typedef {Sent.Lanes & Partial<Pick<Sent.LinesInTime, "lines">>} LanesData a pipeline's, or with lines of code */

export class Lanes {
  #data;
  #events;
  #plan;
  #span;
  #painter;
  /** @type {Overview | null} */
  #overview = null;
  #tip = new Tip();
  /** @type {HTMLElement} */
  #plot;
  #spoken = h("div", { class: "jsm-spoken", "aria-live": "polite" });
  #width = 0;
  /** @type {number | null} */
  #hovered = null; // microbatch under the pointer
  /** @type {number | null} */
  #marked = null; // microbatch that was chosen
  /** @type {{ rank: number, event: number } | null} */
  #cursor = null; // {rank, event} that keys go on from
  #byKeys = false; // whether keys have put it there, so that it is shown
  /** @type {Drag | null} */
  #drag = null;
  /** @type {number | null} */
  #due = null;

  /**
   * @param {LanesData} data
   * @param {Events} events
   */
  constructor(data, events) {
    this.#data = data;
    this.#events = events;
    this.#plan = planOf(data.ranks.length, events.hasIdeal, !data.lines);
    const mean = events.end / Math.max(1, events.count / Math.max(1, data.ranks.length));
    this.#span = new Span(events.end, Math.min(events.end, mean));
    this.element = this.#build();
    this.#painter = new Painter(/** @type {HTMLCanvasElement} */ (this.#plot.firstChild), events, data);
  }

  get plan() {
    return this.#plan;
  }

  get span() {
    return this.#span;
  }

  #build() {
    const { ranks } = this.#data;
    const { pitch, top, height } = this.#plan;
    const rows = ranks.map((rank, i) => ({ rank, i })).filter(({ i }) => i % this.#plan.every === 0);
    const at = (/** @type {number} */ i) => ({ top: `${top + i * pitch}px` });
    const of = this.#data.lines
      ? `${ranks.length} devices, ${this.#events.count} pieces. ${HELP_LINES}`
      : `${ranks.length} ranks, ${this.#events.count} actions. ${HELP}`;
    const label = `Timeline of ${of}`;
    this.#plot = h(
      "div",
      {
        ...OWN_KEYS,
        class: "jsm-pp-plot",
        role: "application",
        "aria-label": label,
        tabindex: 0,
        style: { height: `${height}px` },
        onkeydown: (event) => this.#press(event),
        onfocus: () => this.#focus(),
        onblur: () => this.#place(null),
        onpointerdown: (event) => this.#down(event),
        onpointermove: (event) => this.#move(event),
        onpointerup: (event) => this.#up(event),
        onpointercancel: () => (this.#drag = null),
        onpointerleave: () => this.#leave(),
      },
      h("canvas", { "aria-hidden": "true" }),
    );
    this.#plot.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    const names = rows.map(({ rank, i }) => h("div", { class: "jsm-pp-name", style: at(i) }, name(rank, this.#plan)));
    const figures = rows.map(({ rank, i }) =>
      h("div", { class: "jsm-pp-figures", style: at(i) }, figuresOf(rank, this.#plan, this.#events.hasIdeal)),
    );
    const chart = h(
      "div",
      { class: "jsm-pp-chart" },
      h("div", { class: "jsm-pp-names", style: { height: `${height}px` } }, this.#buttons(), names),
      this.#plot,
      h(
        "div",
        { class: "jsm-pp-right", style: { height: `${height}px` } },
        heads(this.#events.hasIdeal, this.#data.lines),
        figures,
      ),
      this.#tip.element,
      this.#spoken,
    );
    if (!this.#dense(800)) return h("div", {}, chart);
    const overview = new Overview(this.#events, this.#plan, this.#span, () => this.#changed());
    this.#overview = overview;
    return h("div", {}, overview.element, chart);
  }

  #buttons() {
    const button = (/** @type {string} */ text, /** @type {string} */ title, /** @type {() => void} */ act) =>
      h("button", { type: "button", class: "jsm-button", title, "aria-label": title, onclick: act }, text);
    const middle = () => (this.#span.from + this.#span.to) / 2;
    return h(
      "div",
      { class: "jsm-pp-zoom" },
      button("\u2212", "Zoom out (key \u2212)", () => this.#zoom(middle(), -1)),
      button("+", "Zoom in (key +, or Ctrl and the wheel)", () => this.#zoom(middle(), 1)),
      button("all", "Show the whole time (key 0)", () => this.#show(() => this.#span.reset())),
    );
  }

  /**
   * Whether numbers have no room where the whole time is on show.
   *
   * @param {number} width
   */
  #dense(width) {
    return (this.#events.count / Math.max(1, this.#plan.ranks)) * this.#readable > 2 * width;
  }

  /** px of an action whose number is read, or which is seen alone in a lane without numbers. */
  get #readable() {
    if (this.#plan.lane < WRITTEN || this.#data.lines) return SEEN;
    return roomOf(String(this.#events.microbatches - 1).length) + 2;
  }

  /** Make all of it anew for a width of the whole view, in the page's colours. */
  fit() {
    const width = this.#plot.clientWidth;
    if (!width) return;
    const colours = palette(/** @type {Element} */ (this.element.closest(".jsm")));
    if (!this.#width && this.#overview) {
      const mean = this.#events.end / (this.#events.count / this.#plan.ranks);
      this.#span.set(0, (width / this.#readable) * mean);
    }
    this.#width = width;
    this.#painter.fit(this.#plan, width, colours);
    this.#overview?.fit(this.#plot, colours);
    this.#draw();
  }

  #draw() {
    this.#due = null;
    if (!this.#width) return;
    this.#painter.draw(this.#span, this.#hovered ?? this.#marked, this.#byKeys ? this.#cursor : null);
    this.#overview?.mark();
  }

  #changed() {
    this.#due ??= requestAnimationFrame(() => this.#draw());
  }

  /** @param {() => void} change */
  #show(change) {
    change();
    this.#tip.hide();
    this.#changed();
  }

  /**
   * @param {number} at
   * @param {number} times
   */
  #zoom(at, times) {
    this.#show(() => this.#span.step(at, times));
  }

  /** @param {number} x */
  #time(x) {
    return this.#span.from + (x / this.#width) * this.#span.length;
  }

  /** @param {number} time */
  #x(time) {
    return ((time - this.#span.from) / this.#span.length) * this.#width;
  }

  /**
   * What lies under a pointer: its rank, its time, the action there, and whether it is in the curve below.
   *
   * @param {MouseEvent} event
   */
  #under(event) {
    const box = this.#plot.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const { top, pitch, ranks, lane, ideal, held } = this.#plan;
    const rank = Math.floor((y - top) / pitch);
    const time = this.#time(x);
    if (rank < 0 || rank >= ranks || time < 0 || time > this.#events.end) return null;
    const below = y - this.#plan.y(rank);
    const curve = held > 0 && below > lane + (ideal ? ideal + 2 : 0) + 2;
    return { rank, time, x, curve, event: curve ? -1 : this.#events.under(rank, time) };
  }

  /** @param {PointerEvent} event */
  #move(event) {
    if (this.#drag) return this.#dragged(event, this.#drag);
    const found = this.#under(event);
    if (!found) return this.#leave();
    const { rank, time, x, curve } = found;
    const own = found.event >= 0 ? this.#events.lanes[rank] : null;
    this.#point(own ? own.mb[own.first[found.event]] : null);
    const lines = own
      ? told(this.#events, this.#data, { rank, event: found.event })
      : curve
        ? toldHeld(this.#events, this.#data, rank, time)
        : time <= this.#data.end && toldIdle(this.#events, this.#data, rank, time);
    if (lines) this.#tell(lines, own ? Math.min(this.#x(own.end[found.event]), x + 40) : x, rank);
    else this.#tip.hide();
  }

  /**
   * @param {Line[]} lines
   * @param {number} x
   * @param {number} rank
   */
  #tell(lines, x, rank) {
    const left = this.#plot.offsetLeft + x;
    this.#tip.show(lines, left, this.#plan.y(rank), this.#plan.lane);
  }

  /** @param {number | null} mb */
  #point(mb) {
    if (mb === this.#hovered) return;
    this.#hovered = mb;
    this.#changed();
  }

  #leave() {
    this.#point(null);
    this.#tip.hide();
  }

  /** @param {PointerEvent} event */
  #down(event) {
    if (event.button !== 0) return;
    this.#plot.setPointerCapture(event.pointerId);
    this.#drag = { x: event.clientX, from: this.#span.from, moved: false };
  }

  /**
   * @param {PointerEvent} event
   * @param {Drag} drag
   */
  #dragged(event, drag) {
    const by = event.clientX - drag.x;
    if (!drag.moved && Math.abs(by) <= CLICK) return;
    if (!drag.moved) this.#leave();
    drag.moved = true;
    this.#plot.classList.toggle("jsm-dragged", !this.#span.whole);
    this.#span.set(drag.from - (by / this.#width) * this.#span.length, this.#span.length);
    this.#changed();
  }

  /** @param {PointerEvent} event */
  #up(event) {
    const moved = this.#drag?.moved ?? true;
    this.#drag = null;
    this.#plot.classList.remove("jsm-dragged");
    if (moved) return;
    const found = this.#under(event);
    if (!found || found.event < 0) return this.#mark(null);
    const { rank, event: at } = found;
    const { mb, first } = this.#events.lanes[rank];
    this.#place({ rank, event: at }, false);
    this.#mark(mb[first[at]]);
  }

  /**
   * Mark a microbatch, or none; the same one again takes the mark away.
   *
   * @param {number | null} mb
   */
  #mark(mb) {
    this.#marked = mb === this.#marked ? null : mb;
    if (this.#marked === null) this.#hovered = null;
    this.#changed();
  }

  /** @param {WheelEvent} event */
  #wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const box = this.#plot.getBoundingClientRect();
      this.#show(() => this.#span.zoom(this.#time(event.clientX - box.left), Math.exp(-event.deltaY * WHEEL)));
    } else if (!this.#span.whole && (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY))) {
      event.preventDefault();
      const by = event.deltaX || event.deltaY;
      this.#show(() => this.#span.pan((by / this.#width) * this.#span.length));
    }
  }

  /** Whoever comes by keyboard stands on an action at once; a click has put its own. */
  #focus() {
    if (!this.#plot.matches(":focus-visible") || this.#cursor) return;
    this.#place({ rank: 0, event: this.#events.nearest(0, this.#span.from) });
  }

  /**
   * Put the keyboard on an action, and tell of it.
   *
   * @param {Place | null} cursor
   */
  #place(cursor, tell = true) {
    this.#cursor = cursor;
    this.#byKeys = tell;
    this.#changed();
    if (!cursor) return this.#tip.hide();
    const { rank, event } = cursor;
    const { start, end } = this.#events.lanes[rank];
    this.#span.reach(start[event], end[event]);
    if (!tell) return;
    const lines = told(this.#events, this.#data, cursor);
    this.#spoken.textContent = spoken(lines);
    this.#tell(lines, this.#x(end[event]), rank);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const { key } = event;
    const along = { ArrowLeft: -1, ArrowRight: 1 }[key];
    const to = this.#next(key);
    if (along && event.shiftKey) this.#show(() => this.#span.pan(along * PAN * this.#span.length));
    else if (to) this.#place(to);
    else if (key === "+" || key === "=") this.#zoom(this.#middle(), 1);
    else if (key === "-" || key === "_") this.#zoom(this.#middle(), -1);
    else if (key === "0") this.#show(() => this.#span.reset());
    else if ((key === "Enter" || key === " ") && this.#cursor) this.#markAt(this.#cursor);
    else if (key === "Escape" && (this.#marked !== null || !this.#tip.element.hidden)) {
      this.#tip.hide();
      this.#mark(this.#marked);
    } else return;
    event.preventDefault();
  }

  /** @param {Place} place */
  #markAt({ rank, event }) {
    const { first, mb } = this.#events.lanes[rank];
    this.#mark(mb[first[event]]);
    this.#spoken.textContent = this.#said(this.#marked);
  }

  /**
   * What the marks are on, in words.
   *
   * @param {number | null} marked
   */
  #said(marked) {
    const { lines } = this.#data;
    const what = lines ? "line" : "microbatch";
    return marked === null ? `no ${what} marked` : `${what} ${lines ? lines[marked][0] : marked} marked`;
  }

  /** The middle of the action that the keyboard is on, else of what is on show. */
  #middle() {
    if (!this.#cursor) return (this.#span.from + this.#span.to) / 2;
    const { start, end } = this.#events.lanes[this.#cursor.rank];
    return (start[this.#cursor.event] + end[this.#cursor.event]) / 2;
  }

  /**
   * Where a key leads from the keyboard's place, null for a key that leads nowhere.
   *
   * @param {string} key
   */
  #next(key) {
    const { rank, event } = this.#cursor ?? { rank: 0, event: 0 };
    const { count, start, end } = this.#events.lanes[rank];
    /** @type {Record<string, number>} */
    const steps = { ArrowLeft: event - 1, ArrowRight: event + 1, Home: 0, End: count - 1 };
    if (key in steps) return { rank, event: Math.max(0, Math.min(count - 1, steps[key])) };
    const other = rank + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? NaN);
    if (Number.isNaN(other)) return null;
    const row = Math.max(0, Math.min(this.#plan.ranks - 1, other));
    if (row === rank || !this.#events.lanes[row].count) return { rank, event };
    return { rank: row, event: this.#events.nearest(row, (start[event] + end[event]) / 2) };
  }
}

/**
 * @param {Sent.Rank} rank
 * @param {Plan} plan
 */
function name(rank, { pitch }) {
  const more = [rank.stages, rank.of, rank.devices].filter(Boolean);
  return [
    h("b", { title: [rank.name, ...more].join("\n") }, rank.name),
    pitch > 40 ? more.slice(-2).map((text) => h("div", { class: "jsm-pp-of", title: text }, text)) : null,
  ];
}

/**
 * @param {Sent.Rank} rank
 * @param {Plan} plan
 * @param {boolean} hasIdeal
 */
function figuresOf({ bubble, ideal, held, bytes }, { pitch, held: curve }, hasIdeal) {
  const own = h("div", { class: "jsm-pp-shares" }, h("b", {}, bubble), hasIdeal ? h("span", {}, ideal) : null);
  if (!curve || held === null) return own;
  const size = bytes === null ? null : h("span", { class: "jsm-wide" }, `: ${bytes}`);
  return [own, h("div", { class: "jsm-pp-held", style: { top: `${pitch - 24}px` }, title: HELD }, held, size)];
}

/**
 * @param {boolean} hasIdeal
 * @param {Sent.LinesInTime["lines"] | undefined} lines
 */
const heads = (hasIdeal, lines) =>
  h(
    "div",
    { class: "jsm-pp-shares jsm-pp-heads" },
    h(
      "span",
      { title: `The share of this ${lines ? "step in which the device" : "rank's time in which it"} is idle` },
      lines ? "idle" : "bubble",
    ),
    hasIdeal ? h("span", { title: "The same, were all stages alike and transfers free" }, "ideal") : null,
  );
