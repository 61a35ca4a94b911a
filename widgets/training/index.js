// A report's run over its steps: what the step returned, and what was measured of its loop.

import { charts } from "../shared/curve.js";
import { h } from "../shared/dom.js";
import { spans } from "../shared/text.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/**
 * @param {Sent.Report & { training: Sent.Training }} data
 * @param {Mesh} mesh
 */
export function view({ training }, mesh) {
  const { lead, heads, rows, notes } = training;
  const look = (/** @type {number} */ place) => ({ class: place ? "jsm-num" : null });
  return h(
    "div",
    {},
    h("p", { class: "jsm-lead" }, spans(lead, mesh)),
    charts(training.charts),
    h(
      "table",
      { class: "jsm-table jsm-curve-table" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head, place) => h(place ? "th" : "td", look(place), head)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((said, place) => h("td", look(place), said)),
          ),
        ),
      ),
    ),
    notes.map((note) => h("p", { class: "jsm-small jsm-quiet" }, note)),
  );
}
