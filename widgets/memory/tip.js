// All that is known of one bar, beside the pointer or the focus.

import { h, replace } from "../shared/dom.js";
import { bytes, share } from "../shared/format.js";
import { excessOf, measuredOf, offText, rolesOf } from "./devices.js";

/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Bar } from "./devices.js" */
/** @import { Mesh } from "../shared/mesh.js" */

const AWAY = 14; // px from the pointer
const BELOW = 4; // px from the row

/** The tip in `tip.element`, shown and hidden; it never leaves the report, which would make its page scroll. */
export class Tip {
  #memory;
  #mesh;
  /** @type {Bar | null} */
  #bar = null;

  /**
   * @param {Sent.Memory} memory
   * @param {Mesh} mesh
   */
  constructor(memory, mesh) {
    this.#memory = memory;
    this.#mesh = mesh;
    // A screen reader hears the same from the bar's label.
    this.element = h("div", { class: "jsm-tip jsm-bar-tip", "aria-hidden": "true", hidden: true });
  }

  /**
   * Tell of `bar`, whose row lies in `row` (a DOMRect), beside `x`; both in the window's pixels.
   *
   * @param {Bar} bar
   * @param {number} x
   * @param {DOMRect} row
   */
  show(bar, x, row) {
    const { element } = this;
    if (bar !== this.#bar) replace(element, this.#told(bar));
    this.#bar = bar;
    element.hidden = false;
    const [around, report] = [element.offsetParent, element.closest(".jsm")].map((each) =>
      /** @type {Element} */ (each).getBoundingClientRect(),
    );
    const { offsetWidth: width, offsetHeight: height } = element;
    const left = x + AWAY + width > report.right ? x - AWAY - width : x + AWAY;
    const under = row.bottom + BELOW;
    const above = row.top - BELOW - height;
    const top = under + height <= report.bottom ? under : above >= report.top ? above : report.bottom - height;
    element.style.left = `${Math.max(report.left, Math.min(left, report.right - width)) - around.left}px`;
    element.style.top = `${top - around.top}px`;
  }

  hide() {
    this.element.hidden = true;
  }

  /** @param {Bar} bar */
  #told(bar) {
    const { devices, limit, limit_text: text, source } = this.#memory;
    const [peak, excess] = [devices.peak[bar.top], excessOf(this.#memory, bar.top)];
    const measured = measuredOf(this.#memory, bar);
    const line = (/** @type {string} */ name, /** @type {Child} */ value) => [h("dt", {}, name), h("dd", {}, value)];
    const used = peak === null || limit === null ? null : `${share(peak / limit)} of ${text}`;
    return [
      h("b", {}, bar.name),
      h(
        "dl",
        {},
        bar.members.length > 1 ? line("fullest of them", this.#mesh.devices[bar.top]) : null,
        rolesOf(this.#memory).map((role) => line(role, bytes(devices[role][bar.top]))),
        line(`peak, ${source}`, h("b", {}, bytes(peak))),
        measured && line("measured", h("b", {}, bytes(measured.size))),
        measured && measured.off !== null && line("error", offText(measured.off)),
        excess === null ? null : line(excess > 0 ? "too much" : "headroom", bytes(Math.abs(excess))),
        used === null ? null : line("used", used),
      ),
    ];
  }
}
