// Every device's peak in one line, fullest first: what groups of bars leave out.

import { h, replace, s } from "../shared/dom.js";
import { bytes, count } from "../shared/format.js";

const [HEIGHT, TOP, LEFT, RIGHT] = [64, 8, 64, 78]; // px

/** The strip; `draw(width)` and `mark()` as of the bars. */
export class Strip {
  #memory;
  #mesh;
  #selection;
  #order;
  #cursor = null;
  #x = null;
  #said = h("span", { class: "jsm-small jsm-quiet" });

  constructor(data, mesh, selection) {
    [this.#memory, this.#mesh, this.#selection] = [data.memory, mesh, selection];
    const peaks = data.memory.devices.peak;
    this.#order = peaks.flatMap((peak, i) => (peak === null ? [] : [i])).sort((a, b) => peaks[b] - peaks[a] || a - b);
    this.svg = h("div", {});
    this.element = h("div", { class: "jsm-strip" }, this.svg, this.#said);
  }

  draw(width) {
    const peaks = this.#memory.devices.peak;
    const most = Math.max(this.#memory.limit ?? 0, peaks[this.#order[0]] ?? 1);
    const n = this.#order.length;
    const [x1, bottom] = [width - RIGHT, TOP + HEIGHT];
    this.#x = (i) => LEFT + ((x1 - LEFT) * i) / Math.max(1, n);
    const y = (size) => bottom - (HEIGHT * size) / most;
    const edge = this.#order.map((position, i) => `L${this.#x(i).toFixed(1)} ${y(peaks[position]).toFixed(1)}H${this.#x(i + 1).toFixed(1)}`);
    const line = `M${LEFT} ${y(peaks[this.#order[0]])}${edge.join("").replace(/^L\S+ \S+?(?=H)/, "")}`;
    const limit = this.#memory.limit;
    this.#cursor = s("line", { y1: TOP - 4, y2: bottom, class: "jsm-strip-cursor" });
    const drawn = s(
      "svg",
      {
        width,
        height: bottom + 4,
        role: "img",
        "aria-label": `Peak memory of ${count(n)} devices, fullest first: ${bytes(peaks[this.#order[0]])} to ${bytes(peaks[this.#order.at(-1)])}`,
        onpointermove: (event) => this.#selection.point(this.#under(event)),
        onpointerleave: () => this.#selection.point(null),
        onclick: (event) => this.#selection.select({ device: this.#under(event) }),
      },
      s("rect", { x: LEFT, y: TOP, width: x1 - LEFT, height: HEIGHT, fill: "transparent" }),
      s("path", { d: `${line}V${bottom}H${LEFT}Z`, fill: "var(--jsm-fill-2)" }),
      s("path", { d: line, fill: "none", stroke: "var(--jsm-ink-2)" }),
      limit === null ? null : s("line", { x1: LEFT, x2: x1, y1: y(limit), y2: y(limit), stroke: "var(--jsm-error)", "stroke-width": 1.5 }),
      s("text", { x: LEFT - 8, y: y(most) + 4, "text-anchor": "end", class: "jsm-mark" }, limit === null ? bytes(most) : this.#memory.limit_text),
      s("text", { x: LEFT - 8, y: bottom, "text-anchor": "end", class: "jsm-mark" }, "0"),
      this.#cursor,
    );
    replace(this.svg, drawn);
    this.mark();
  }

  mark() {
    const at = this.#order.indexOf(this.#selection.shown);
    this.#cursor.style.display = at < 0 ? "none" : "";
    const peaks = this.#memory.devices.peak;
    if (at >= 0) {
      const x = (this.#x(at) + this.#x(at + 1)) / 2;
      this.#cursor.setAttribute("x1", x);
      this.#cursor.setAttribute("x2", x);
    }
    this.#said.textContent =
      at < 0
        ? `${count(this.#order.length)} devices, fullest first`
        : `device ${this.#mesh.devices[this.#order[at]]}: ${bytes(peaks[this.#order[at]])}, number ${count(at + 1)} of ${count(this.#order.length)}, fullest first`;
  }

  #under(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const [from, to] = [this.#x(0), this.#x(this.#order.length)];
    const i = Math.floor(((event.clientX - box.left - from) / (to - from)) * this.#order.length);
    return this.#order[i] ?? null;
  }
}
