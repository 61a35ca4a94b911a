// Where the time of recorded steps went: one step in lanes, lines by time, collectives and devices.

import { Events } from "../pipeline/events.js";
import { follow } from "../pipeline/index.js";
import { Lanes } from "../pipeline/lanes.js";
import { h } from "../shared/dom.js";
import { counted } from "../shared/format.js";
import { more } from "../shared/more.js";
import { spans } from "../shared/text.js";

/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */

const ROWS = 12; // of a table, listed at first
const WORDS = new Set(["phase", "collective", "over"]); // columns that are no figures

/** @param {Sent.Report & { measured: Sent.Measured }} data */
export function view({ measured }) {
  const lanes = new Lanes(measured.lanes, new Events(measured.lanes));
  const element = h(
    "div",
    { class: "jsm-measured" },
    h(
      "p",
      { class: "jsm-lead" },
      spans(measured.lead, { names: [] }),
      " ",
      h("span", { class: "jsm-quiet" }, measured.about),
    ),
    measured.notes.map((note) => h("p", { class: "jsm-small jsm-quiet" }, note)),
    legend(measured.kinds),
    lanes.element,
    lines(measured),
    h(
      "div",
      { class: "jsm-ms-tables" },
      measured.tables.map(([heads, rows]) => h("div", {}, table(heads, rows, heads[0]))),
    ),
  );
  follow(element, () => lanes.fit());
  return element;
}

/** @param {Sent.Measured["kinds"]} kinds */
const legend = (kinds) =>
  h(
    "div",
    { class: "jsm-pp-legend" },
    kinds.map(([kind, name]) =>
      h("span", {}, h("i", { class: "jsm-key", style: { background: `var(--jsm-${kind})` } }), name),
    ),
    h("span", {}, h("i", { class: "jsm-key jsm-pp-hatch" }), "idle"),
    h("span", { class: "jsm-pp-lanes" }, "one typical step"),
  );

/**
 * The lines of code by time, each with its text below its name.
 *
 * @param {Sent.Measured} measured
 */
function lines({ heads, rows }) {
  const [first, , ...figures] = heads;
  const cells = rows.map(([name, text, ...rest]) => [
    [h("span", {}, name), h("code", { class: "jsm-mono jsm-ms-code", title: text }, text)],
    ...rest,
  ]);
  return table([first, ...figures], cells, "Lines by measured time");
}

/**
 * @param {string[]} heads
 * @param {Child[][]} rows
 * @param {string} named
 */
function table(heads, rows, named) {
  const number = (/** @type {number} */ i) => (i && !WORDS.has(heads[i]) ? "jsm-num" : null);
  const made = (/** @type {Child[]} */ row) =>
    h(
      "tr",
      {},
      row.map((cell, i) => h("td", { class: number(i) }, cell)),
    );
  const body = h("tbody", {}, rows.slice(0, ROWS).map(made));
  const head = h(
    "tr",
    {},
    heads.map((name, i) => h("th", { scope: "col", class: number(i) }, name)),
  );
  const rest = rows.slice(ROWS);
  return [
    h("table", { class: "jsm-table", "aria-label": named }, h("thead", {}, head), body),
    more(counted(rest.length, "more row"), rest, made, body),
  ];
}
