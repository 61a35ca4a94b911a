// The end of a long table: what it leaves out, and a button that lists it.

import { h } from "../shared/dom.js";
import { bytes, count } from "../shared/format.js";

/** `39 more send 12.4 MiB`; `make(part)` gives the rows that go into `body`, nothing where none are left. */
export function more(parts, make, body) {
  if (!parts.length) return null;
  const sent = bytes(parts.reduce((sum, part) => sum + part.sent, 0));
  const said = `${count(parts.length)} more ${parts.length === 1 ? "sends" : "send"} ${sent}`;
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
