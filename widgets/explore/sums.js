// What one device holds of the array, how often each slice is there, and what that changes.

import { h, replace } from "../shared/dom.js";
import { count, SPACE } from "../shared/format.js";
import { bytesNodes } from "../shared/text.js";
import { difference, nowText, totalText } from "./words.js";

/** @import { Worked } from "./worked.js" */
/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */

/**
 * `{element, draw(work, leaf)}`.
 *
 * @param {Sent.Explorer} data
 */
export function sums(data) {
  const element = h("div", { class: "jsm-ex-sums" });

  /**
   * @param {Worked} work
   * @param {number} leaf
   */
  function draw(work, leaf) {
    const copies = work.copies(leaf);
    const more = difference(data, work, leaf);
    const [number, unit] = more.value.split(SPACE);
    const total = totalText(data, work);
    replace(
      element,
      h(
        "div",
        { class: "jsm-ex-figures" },
        figure("per device", bytesNodes(work.held[leaf]), nowText(data, work, leaf)),
        figure(
          "copies of each slice",
          count(copies),
          copies === 1 ? "nothing kept twice" : `${count(copies)} devices hold the same`,
        ),
        figure(more.label, [number, unit ? h("span", { class: "jsm-u" }, unit) : null], more.note),
      ),
      total ? h("div", { class: "jsm-small jsm-quiet jsm-ex-total" }, total) : null,
    );
  }

  return { element, draw };
}

/**
 * @param {string} label
 * @param {Child} value
 * @param {string} note
 */
const figure = (label, value, note) =>
  h(
    "div",
    {},
    h("div", { class: "jsm-small jsm-quiet" }, label),
    h("div", { class: "jsm-ex-value" }, value),
    h("div", { class: "jsm-small jsm-quiet" }, note),
  );
