// Panels one by one: which one is shown, and buttons to the next.

import { h, replace } from "../shared/dom.js";
import { count } from "../shared/format.js";

/**
 * `{node, set(number, total, words), reserve(total, widest)}`; `turn(step)` is called with -1 or 1. What is
 * reserved keeps the height the same for all panels.
 *
 * @param {(step: number) => void} turn
 */
export function pager(turn) {
  const said = h("span", {});
  const space = h("span", { class: "jsm-detail-space", "aria-hidden": "true" });
  const button = (/** @type {number} */ step, /** @type {string} */ name, /** @type {string} */ mark) =>
    h("button", { type: "button", class: "jsm-button", "aria-label": name, onclick: () => turn(step) }, mark);
  const node = h(
    "div",
    { class: "jsm-detail-pager" },
    button(-1, "Previous panel", "‹"),
    button(1, "Next panel", "›"),
    h("span", { class: "jsm-detail-stack" }, space, said),
  );
  const text = (/** @type {number} */ number, /** @type {number} */ total, /** @type {string} */ words) =>
    `panel ${count(number + 1)} of ${count(total)}: ${words}`;
  return {
    node,
    set: (/** @type {number} */ number, /** @type {number} */ total, /** @type {string} */ words) =>
      replace(said, text(number, total, words)),
    reserve: (/** @type {number} */ total, /** @type {string} */ widest) =>
      replace(space, text(total - 1, total, widest)),
  };
}
