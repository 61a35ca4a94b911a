// The end of a long table: what it leaves out, and a button that lists it.

import { h } from "./dom.js";

/** @import { Child } from "./dom.js" */

/**
 * `said` of the `parts` that are left out, and the button; `make(part)` gives the row that goes into `body`. Nothing
 * where none are left.
 *
 * @param {Child} said
 * @param {any[]} parts
 * @param {(part: any) => HTMLElement} make
 * @param {HTMLElement} body
 */
export function more(said, parts, make, body) {
  if (!parts.length) return null;
  const button = h("button", { type: "button", class: "jsm-button", onclick: show }, "Show all");
  const line = h("p", { class: "jsm-more jsm-small jsm-quiet" }, said, button);

  function show() {
    const added = parts.map(make);
    added[0].tabIndex = -1; // the keyboard goes on where the button was
    body.append(...added);
    added[0].focus();
    line.remove();
  }

  return line;
}
