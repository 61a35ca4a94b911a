// Bytes live on one device through the step, in the compiler's order of instructions.

import { h, s } from "../shared/dom.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Scale } from "./scale.js" */

const [HEIGHT, TOP, BELOW] = [64, 16, 20]; // px of the curve, of the label above it, of the phases below
const LETTER = 5.6; // px of a letter of the marks' size
const CLEAR = 8; // px between the peak's line and its label
const SAYS =
  "Arguments, outputs and temporaries that lie in memory while each instruction runs, one device, by where the" +
  " compiler has put them";

/** The curve in `live.element`; `draw(plan)` makes it anew for a width. */
export class Live {
  #live;
  #plot = h("div", {});

  /** @param {Sent.LiveMemory} live */
  constructor(live) {
    this.#live = live;
    this.element = h(
      "div",
      { class: "jsm-live" },
      h("h3", { title: SAYS }, "Live bytes through the step"),
      h("p", { class: "jsm-small jsm-quiet" }, live.lead),
      this.#plot,
    );
  }

  /** @param {Pick<Scale, "width">} plan */
  draw({ width }) {
    this.#plot.replaceChildren(drawn(this.#live, width));
  }
}

/**
 * @param {Sent.LiveMemory} live
 * @param {number} width
 */
function drawn(live, width) {
  const top = live.bytes[live.peak];
  const x = (/** @type {number} */ at) => (width * at) / Math.max(1, live.instructions);
  const y = (/** @type {number} */ held) => TOP + HEIGHT * (1 - held / Math.max(1, top));
  const bottom = TOP + HEIGHT;
  const point = (/** @type {number} */ i) => `${x(live.at[i]).toFixed(1)} ${y(live.bytes[i]).toFixed(1)}`;
  const steps = live.at.slice(1).map((at, i) => `H${x(at).toFixed(1)}V${y(live.bytes[i + 1]).toFixed(1)}`);
  const line = `M${point(0)}${steps.join("")}H${width}`;
  const { told } = live;
  const peak = Math.min(width - 1, Math.max(1, x(live.at[live.peak])));
  const behind = { x: peak + CLEAR, "text-anchor": "start" };
  const before = { x: peak - CLEAR, "text-anchor": "end" };
  const after = peak + CLEAR + LETTER * told.length < width;
  return s(
    "svg",
    { width, height: bottom + BELOW, role: "img", "aria-label": `Live bytes through the step: ${told}` },
    s("path", { d: `${line}V${bottom}H0Z`, class: "jsm-live-area" }),
    s("path", { d: line, class: "jsm-live-line" }),
    s("path", { d: `M${peak} ${TOP - 8}V${bottom}`, class: "jsm-live-peak" }),
    s("text", { ...(after ? behind : before), y: 10, class: "jsm-mark jsm-ink" }, told),
    phases(live, x, bottom),
  );
}

/**
 * @param {Sent.LiveMemory} live
 * @param {(at: number) => number} x
 * @param {number} bottom
 */
function phases({ phases: found, instructions }, x, bottom) {
  return found.map(([name, from], i) => {
    const [start, end] = [x(from), x(found[i + 1]?.[1] ?? instructions)];
    if (end - start < 2) return null;
    const fits = end - start > LETTER * name.length;
    return [
      s("path", { d: `M${start} ${bottom + 3.5}H${Math.max(start, end - 2)}`, class: "jsm-hair" }),
      fits
        ? s("text", { x: (start + end) / 2, y: bottom + 16, "text-anchor": "middle", class: "jsm-mark" }, name)
        : null,
    ];
  });
}
