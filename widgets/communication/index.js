// What moves between devices in one step: over which axes, and which line of the user's code causes it.

import { h } from "../shared/dom.js";
import { figures } from "../shared/figures.js";
import { lineNamed } from "../shared/lines.js";
import { spans } from "../shared/text.js";
import { overAxes } from "./axes.js";
import { collectives } from "./collectives.js";
import { SourceView } from "./source.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

/**
 * @param {Sent.Report & { communication: Sent.Communication }} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
export function view({ communication, figures_of: drawn }, mesh, selection) {
  const { rows, sources, lead } = communication;
  const line = (/** @type {string} */ text) => {
    const named = lineNamed(communication, text);
    return named && (() => selection.select({ line: named }));
  };
  return h(
    "div",
    { class: "jsm-communication" },
    h("p", { class: "jsm-lead" }, spans(lead, mesh, { line })),
    rows.length > 0 && overAxes(communication, mesh), // else the lead says that nothing moves
    rows.length > 0 &&
      (sources.length ? new SourceView(communication, mesh, selection).element : collectives(communication, mesh)),
    figures(drawn?.communication),
  );
}
