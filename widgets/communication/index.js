// What moves between devices in one step: over which axes, by which collectives.

import { h } from "../shared/dom.js";
import { spans } from "../shared/text.js";
import { overAxes } from "./axes.js";
import { collectives } from "./collectives.js";

export function view({ communication }, mesh) {
  const tables = communication.rows.length ? [overAxes, collectives] : []; // the lead says that nothing moves
  return h(
    "div",
    { class: "jsm-communication" },
    h("p", { class: "jsm-lead" }, spans(communication.lead, mesh)),
    tables.map((table) => table(communication, mesh)),
  );
}
