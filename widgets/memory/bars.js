// A bar per device, or per group of devices that are alike, stacked by role against the limit.

import { h, replace, s, uniqueId } from "../shared/dom.js";
import { bytes, share } from "../shared/format.js";
import { ticks } from "./scale.js";

const [ROW, BAR, TOP, BOTTOM] = [19, 13, 18, 22]; // px
const SEEN = 0.3; // px from which a role is drawn, and how wide at least
const LEAST = 0.75;
const ARROW = 150; // px between a bar and the limit from which the headroom is written in
const ROOM = 1.04; // of the largest figure, to the right end

/**
 * What stands in a row: `label`, `times` devices of which `top` is shown, and `members`, positions.
 *
 * @typedef {{label: string, times: number, top: number, members: number[]}} Bar
 */

/** The bars for `width` px, in `bars.element`; `bars.mark()` follows the selection. */
export class Bars {
  #data;
  #mesh;
  #selection;
  #listed;
  #hatch = uniqueId("hatch");
  #over = uniqueId("over");
  #nodes = [];
  #width = 0;

  /** @param {Bar[]} listed */
  constructor(data, mesh, selection, listed) {
    [this.#data, this.#mesh, this.#selection, this.#listed] = [data.memory, mesh, selection, listed];
    this.tip = h("div", { class: "jsm-tip", role: "tooltip", hidden: true });
    this.list = h("div", { class: "jsm-bars-list", role: "listbox", "aria-label": "Devices by memory", onkeydown: (e) => this.#key(e) });
    this.element = h("div", { class: "jsm-bars", onpointerleave: () => this.#leave() }, this.list, this.tip);
  }

  /** All roles of the device at `position`, as [role, bytes]. */
  #parts(position) {
    return this.#data.roles.map((role) => [role, this.#data.devices[role]?.[position] ?? 0]);
  }

  #held(position) {
    const peak = this.#data.devices.peak[position];
    return peak ?? this.#parts(position).reduce((sum, [, size]) => sum + size, 0);
  }

  draw(width) {
    this.#width = width;
    const { limit, limit_text: text } = this.#data;
    const most = Math.max(limit ?? 0, 1, ...this.#listed.map(({ top }) => this.#held(top)));
    const wide = Math.max(...this.#listed.map(({ label }) => label.length));
    const [x0, x1] = [Math.max(24, Math.min(120, 6.4 * wide + 14)), width - 78];
    const x = (size) => x0 + ((x1 - x0) * size) / (most * ROOM);
    const bottom = TOP + this.#listed.length * ROW;
    const frame = s(
      "svg",
      { class: "jsm-bars-frame", width, height: bottom + BOTTOM, "aria-hidden": "true" },
      s("defs", {}, pattern(this.#hatch, "var(--jsm-other)"), pattern(this.#over, "var(--jsm-error)")),
      ticks(most * ROOM).map(([at, label]) => tick(Math.round(x(at)) + 0.5, label, bottom, at === 0)),
      s("text", { x: 0, y: 8, class: "jsm-mark" }, "device"),
      s("text", { x: width, y: 8, class: "jsm-mark", "text-anchor": "end" }, this.#data.source),
      limit === null ? null : limitLine(Math.round(x(limit)) + 0.5, text, bottom, this.#tooMuch()),
    );
    this.#nodes = this.#listed.map((bar, i) => this.#row(bar, i, x, { x0, width }));
    replace(this.list, this.#nodes);
    this.element.style.height = `${bottom + BOTTOM}px`;
    this.element.querySelector(".jsm-bars-frame")?.remove();
    this.element.prepend(frame);
    this.mark();
  }

  /** By how much the fullest device is over the limit, null where none is. */
  #tooMuch() {
    const over = Math.max(...this.#listed.map(({ top }) => this.#data.devices.peak[top] ?? 0)) - this.#data.limit;
    return over > 0 ? `${bytes(over)} too much` : null;
  }

  #row(bar, i, x, { x0, width }) {
    const { limit } = this.#data;
    const peak = this.#data.devices.peak[bar.top];
    let at = 0;
    const drawn = this.#parts(bar.top).map(([role, size]) => {
      const [from, to] = [x(at), x((at += size))];
      return to - from > SEEN ? segment(role, from, to, this.#hatch) : null;
    });
    const end = x(this.#held(bar.top));
    const last = peak === null ? s("path", { d: `M${end} 2h6M${end} ${BAR + 2}h6`, class: "jsm-open-end" }) : null;
    const over = limit !== null && peak !== null && peak > limit;
    const high = over ? s("rect", { x: x(limit), y: 2, width: end - x(limit), height: BAR, fill: `url(#${this.#over})`, stroke: "var(--jsm-error)" }) : null;
    const room = i === 0 && limit !== null && peak !== null && !over ? headroom(limit, peak, end, x(limit)) : null;
    const label = s("text", { x: x0 - 8, y: BAR - 0.5, "text-anchor": "end", class: "jsm-mark jsm-bar-name" }, bar.label);
    const times = bar.times > 1 ? s("text", { x: end + 8, y: BAR - 0.5, class: "jsm-mark" }, `\u00d7 ${bar.times}`) : null;
    const held = s("text", { x: width, y: BAR - 0.5, "text-anchor": "end", class: "jsm-mark jsm-bar-held" }, bytes(peak));
    return h(
      "div",
      {
        class: "jsm-bar-row",
        role: "option",
        tabindex: -1,
        "aria-label": this.#spoken(bar),
        style: { top: `${TOP + i * ROW}px`, height: `${ROW}px` },
        onpointermove: (event) => this.#point(i, event),
        onclick: () => this.#choose(i),
      },
      s("svg", { width, height: ROW, "aria-hidden": "true" }, label, drawn, high, last, room, times, held),
    );
  }

  #spoken(bar) {
    const { devices, limit } = this.#data;
    const parts = this.#parts(bar.top).map(([role, size]) => `${role} ${bytes(devices[role]?.[bar.top] ?? (role === "temporaries" ? null : size))}`);
    const of = limit === null ? "" : ` of ${bytes(limit)}`;
    const who = bar.times > 1 ? `${bar.times} devices, ${bar.label}` : `device ${bar.label}`;
    return `${who}: ${bytes(devices.peak[bar.top])}${of}; ${parts.join(", ")}`;
  }

  #at(position) {
    return this.#listed.findIndex((bar) => bar.top === position || bar.members.includes(position));
  }

  /** Show which rows hold the chosen device and the one that is pointed at. */
  mark() {
    const chosen = this.#selection.device === null ? -1 : this.#at(this.#selection.device);
    const shown = this.#selection.shown === null ? -1 : this.#at(this.#selection.shown);
    this.#nodes.forEach((node, i) => {
      node.setAttribute("aria-selected", String(i === chosen));
      node.classList.toggle("jsm-pointed", i === shown);
      node.tabIndex = i === Math.max(0, chosen) ? 0 : -1;
    });
  }

  #choose(i) {
    const bar = this.#listed[i];
    if (!bar.members.includes(this.#selection.device)) this.#selection.select({ device: bar.top });
  }

  #key(event) {
    const at = this.#nodes.indexOf(event.target);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: this.#nodes.length - 1 }[event.key];
    if (["Enter", " "].includes(event.key) && at >= 0) this.#choose(at);
    else if (to in this.#nodes) {
      this.#choose(to);
      this.#nodes[to].focus();
    } else return;
    event.preventDefault();
  }

  #point(i, event) {
    const bar = this.#listed[i];
    this.#selection.point(bar.top);
    const box = this.element.getBoundingClientRect();
    if (this.tip.dataset.row !== String(i)) {
      this.tip.dataset.row = String(i);
      replace(this.tip, this.#told(bar));
    }
    this.tip.hidden = false;
    const left = Math.min(event.clientX - box.left + 16, this.#width - this.tip.offsetWidth - 2);
    this.tip.style.left = `${Math.max(0, left)}px`;
    this.tip.style.top = `${TOP + (i + 1) * ROW + 4}px`;
  }

  #leave() {
    this.tip.hidden = true;
    this.#selection.point(null);
  }

  #told(bar) {
    const { devices, limit } = this.#data;
    const peak = devices.peak[bar.top];
    const line = (name, text) => h("div", {}, h("span", { class: "jsm-quiet" }, `${name} `), text);
    const name = bar.times > 1 ? `${bar.times} devices, as ${this.#mesh.devices[bar.top]}` : `device ${bar.label}`;
    return [
      h("b", {}, name),
      this.#data.roles.map((role) => line(role, bytes(devices[role]?.[bar.top] ?? null))),
      line(`peak, ${this.#data.source}`, bytes(peak)),
      limit === null || peak === null ? null : line(peak > limit ? "too much" : "headroom", `${bytes(Math.abs(limit - peak))}, ${share(peak / limit)} used`),
    ];
  }
}

function segment(role, from, to, hatch) {
  const gap = to - from > 3 ? 0.75 : 0;
  const width = Math.max(LEAST, to - from - gap);
  if (role !== "other") return s("rect", { x: from, y: 2, width, height: BAR, fill: `var(--jsm-${role})` });
  return s("rect", { x: from, y: 2, width, height: BAR, fill: `url(#${hatch})`, stroke: "var(--jsm-other)", "stroke-width": 0.75 });
}

const pattern = (id, ink) =>
  s(
    "pattern",
    { id, width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { width: 4, height: 4, fill: "var(--jsm-bg)" }),
    s("rect", { width: 1.6, height: 4, fill: ink }),
  );

const tick = (x, label, bottom, first) => [
  s("line", { x1: x, x2: x, y1: TOP - 3, y2: bottom, class: "jsm-hair" }),
  s("text", { x, y: bottom + 14, class: "jsm-mark", "text-anchor": first ? "start" : "middle" }, label),
];

const limitLine = (x, text, bottom, tooMuch) => [
  s("line", { x1: x, x2: x, y1: TOP - 6, y2: bottom, stroke: "var(--jsm-error)", "stroke-width": 1.5 }),
  s("text", { x, y: 8, class: "jsm-mark jsm-limit", "text-anchor": "end" }, tooMuch ? `${tooMuch}, limit ${text}` : `limit ${text}`),
];

/** An arrow from the bar to the limit with what is free. */
function headroom(limit, peak, end, line) {
  const middle = 2 + BAR / 2;
  if (line - end < ARROW) return null;
  const [from, to, at] = [end + 8, line - 3, (end + line) / 2];
  return [
    s("path", { d: `M${from} ${middle}H${at - 56}M${at + 56} ${middle}H${to}M${to - 5} ${middle - 3}l5 3l-5 3M${from + 5} ${middle - 3}l-5 3l5 3`, fill: "none", stroke: "var(--jsm-ink-3)" }),
    s("text", { x: at, y: BAR - 0.5, "text-anchor": "middle", class: "jsm-mark jsm-ink" }, `${bytes(limit - peak)} headroom`),
  ];
}
