// What one line moves: a row for each array, or for arrays that are alike.

import { h } from "../shared/dom.js";
import { bytes, count, seconds, UNKNOWN } from "../shared/format.js";
import { least, number, over } from "../shared/kinds.js";
import { more } from "../shared/more.js";
import { bytesNodes } from "../shared/text.js";
import { groupGlyph } from "./group.js";
import { hidden, merged, moreSent, WAITED } from "./lines.js";

/** @import { Part } from "./lines.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Weigher } from "./lines.js" */
/** @import { Mesh } from "../shared/mesh.js" */

const ROWS = 12; // listed at first
const PHASES = ["forward", "backward", "update"];

/**
 * The table for the rows of one line, named `label`.
 *
 * @param {Sent.Collective[]} rows
 * @param {Weigher} weigher
 * @param {Mesh} mesh
 * @param {string} label
 */
export function detail(rows, { timed, weight }, mesh, label) {
  const alike = (/** @type {Sent.Collective} */ { kind, axes, group_size, what, bytes: size }) =>
    `${kind} ${axes} ${group_size} ${size} ${what}`;
  const parts = merged(rows, alike).sort((a, b) => weight(b) - weight(a) || b.sent - a.sent);
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "collective"),
    h(
      "th",
      { scope: "col", class: "jsm-extra", title: "The devices that talk to each other, as a group of the mesh" },
      "group",
    ),
    h("th", { scope: "col" }, "what moves"),
    h("th", { scope: "col", title: "The part of the step that it runs in; both: forward and backward" }, "phase"),
    h("th", { scope: "col", class: "jsm-num jsm-extra", title: PAYLOAD }, "count \u00d7 payload"),
    number("sent", "Bytes that one device sends per step, all of them together"),
    timed ? number("predicted", WAITED) : null,
    from(rows)
      ? h(
          "th",
          { scope: "col", class: "jsm-extra", title: "The line of the step's own code that led there" },
          "called at",
        )
      : null,
  );
  const made = (/** @type {Part} */ part) => tableRow(part, { timed, from: from(rows) }, mesh);
  const body = h("tbody", {}, parts.slice(0, ROWS).map(made));
  const table = h("table", { class: "jsm-table", "aria-label": label }, h("thead", {}, head), body);
  const rest = parts.slice(ROWS);
  return h("div", { class: "jsm-moves" }, table, more(moreSent(rest), rest, made, body));
}

const PAYLOAD =
  "How often it runs per step, loop trips multiplied in, and the size on one device of the gathered array, or of the" +
  " one before it is reduced";

/** @param {Sent.Collective[]} rows */
const from = (rows) => rows.some(({ called }) => called !== null);

/**
 * @param {Part} part
 * @param {{ timed: boolean, from: boolean }} shown
 * @param {Mesh} mesh
 */
function tableRow(part, shown, mesh) {
  const { rows, kind, axes, size, count: times, sent, seconds: spent, exact } = part;
  const [{ bytes: payload, what }] = rows;
  return h(
    "tr",
    {},
    h("td", { class: "jsm-moved" }, kind, " ", over(axes, size, mesh)),
    h("td", { class: "jsm-extra" }, axes === null ? UNKNOWN : groupGlyph(axes, mesh)),
    h("td", { class: "jsm-what" }, what ?? UNKNOWN),
    h("td", { class: "jsm-quiet" }, phaseOf(rows)),
    h("td", { class: "jsm-num jsm-extra" }, least(count(times), exact), ` \u00d7 ${bytes(payload)}`),
    h("td", { class: "jsm-num" }, least(bytesNodes(sent), exact)),
    shown.timed ? h("td", { class: "jsm-num", title: hidden(part) }, least(seconds(spent), exact)) : null,
    shown.from ? h("td", { class: "jsm-extra jsm-mono jsm-quiet jsm-from" }, places(rows)) : null,
  );
}

/**
 * `both` stands for forward and backward.
 *
 * @param {Sent.Collective[]} rows
 */
function phaseOf(rows) {
  const found = PHASES.filter((phase) => rows.some((row) => row.phase === phase));
  return found.join() === "forward,backward" ? "both" : found.join(", ") || UNKNOWN;
}

/**
 * `[7]:31, 44`: a cell's or file's name once.
 *
 * @param {Sent.Collective[]} rows
 */
function places(rows) {
  const found = [...new Set(rows.map(({ called }) => called).filter((called) => called !== null))];
  /** @type {string | null} */
  let before = null;
  return found
    .map((called) => {
      const file = called.slice(0, called.lastIndexOf(":") + 1);
      const short = file && file === before ? called.slice(file.length) : called;
      before = file;
      return short;
    })
    .join(", ");
}
