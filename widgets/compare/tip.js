// What is known of a point, beside it.

import { h, replace } from "../shared/dom.js";
import { count } from "../shared/format.js";
import { meshNodes, nameNodes } from "./cells.js";

/** @import * as Sent from "../shared/payload_types.js" */

const AWAY = 12; // px from the point
const NAMED = 3; // of those at the same place

/** The tip in `tip.element`, which never leaves the picture's width. A screen reader hears the point's label. */
export class Tip {
  #data;
  element = h("div", { class: "jsm-tip jsm-cmp-tip", "aria-hidden": "true", hidden: true });

  /** @param {Sent.Comparison} data */
  constructor(data) {
    this.#data = data;
  }

  /**
   * Tell of `trial`, whose point is at `x`, `y` of the element around; `others` are the names of those there too.
   *
   * @param {Sent.Trial} trial
   * @param {number} x
   * @param {number} y
   * @param {string[]} others
   */
  show(trial, x, y, others) {
    const { element } = this;
    replace(
      element,
      h("div", { class: "jsm-mono" }, nameNodes(trial)),
      h("div", { class: "jsm-mono jsm-quiet" }, meshNodes(trial, this.#data.axes)),
      h(
        "dl",
        {},
        trial.facts.map(([term, told]) => [h("dt", {}, term), h("dd", {}, told)]),
      ),
      others.length ? h("div", { class: "jsm-quiet" }, `also here: ${told(others)}`) : null,
    );
    element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = element;
    const around = /** @type {Element} */ (element.offsetParent);
    const left = x + AWAY + width > around.clientWidth ? x - AWAY - width : x + AWAY;
    element.style.left = `${Math.max(0, left)}px`;
    element.style.top = `${Math.max(0, Math.min(y + AWAY, around.clientHeight - height))}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

/** @param {string[]} names */
const told = (names) =>
  [...names.slice(0, NAMED), names.length > NAMED ? `${count(names.length - NAMED)} more` : null]
    .filter(Boolean)
    .join(", ");
