// The limit on a scale of its own, where so little of it is used that no bar would be seen there: what of it the bars
// below show.

import { h, replace, s } from "../shared/dom.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Scale } from "./scale.js" */

const [TOP, BAR, FALL] = [4, 7, 16]; // px above the strip, of the strip, and from it to the bars
const LEAST = 1.5; // px

/** The strip in `whole.element`; `draw(plan)` makes it anew for the scale of the bars. */
export class Whole {
  #memory;
  #plot = h("div", {});

  /** @param {Sent.Memory} memory */
  constructor(memory) {
    this.#memory = memory;
    this.element = h(
      "div",
      { class: "jsm-whole" },
      h("p", { class: "jsm-small jsm-quiet" }, memory.scale_note),
      this.#plot,
    );
  }

  /** @param {Scale} plan */
  draw({ width, x0, x1, end }) {
    const { limit, limit_text: text } = this.#memory;
    const [from, to] = [x0, x1];
    const seen = Math.max(LEAST, ((to - from) * end) / (limit ?? end));
    const bottom = TOP + BAR;
    replace(
      this.#plot,
      s(
        "svg",
        { width, height: bottom + FALL, "aria-hidden": "true" },
        s("rect", { x: from, y: TOP, width: to - from, height: BAR, class: "jsm-whole-all" }),
        s("path", {
          d: `M${from} ${bottom}L${from} ${bottom + FALL}H${to}L${from + seen} ${bottom}Z`,
          class: "jsm-whole-fall",
        }),
        s("rect", { x: from, y: TOP, width: seen, height: BAR, class: "jsm-whole-seen" }),
        s("path", { d: `M${to} ${TOP - 3}V${bottom + 3}`, class: "jsm-limit-line" }),
        s("text", { x: to + 6, y: TOP + BAR, class: "jsm-mark jsm-limit" }, text),
      ),
    );
  }
}
