// What the compiler made of a line, beside what was told of it before.

import { axisClass, paint } from "../shared/axes.js";
import { h, replace } from "../shared/dom.js";
import { number } from "../shared/kinds.js";
import { sign, spans } from "../shared/text.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Trial } from "./trial.js" */
/** @import { Worked } from "./worked.js" */

/**
 * `{element, draw(work)}`.
 *
 * @param {Trial} trial
 */
export function compiledTable(trial) {
  const element = h("div", { class: "jsm-ex-compiled", "aria-live": "polite" });

  /** @param {Worked} work */
  function draw(work) {
    const { compiled } = trial;
    if (!compiled || compiled === "asked") return;
    paint(element, compiled.axes);
    const stale = compiled.line !== work.line;
    const head = h(
      "div",
      { class: "jsm-ex-head" },
      h("h3", {}, compiled.error ? "Not compiled" : "Compiled"),
      h(
        "span",
        { class: "jsm-small jsm-quiet" },
        stale ? ["an earlier line: ", h("code", {}, compiled.line)] : "this line, nothing has run",
      ),
    );
    replace(element, head, compiled.error ? failed(compiled) : [verdict(compiled), table(compiled)]);
  }

  return { element, draw };
}

/** @param {Sent.Compiled} compiled */
const failed = ({ error }) => h("p", { class: "jsm-error" }, sign("error", null), " ", error);

/** @param {Sent.Compiled} compiled */
const verdict = ({ verdict: said, axes }) => h("p", { class: "jsm-lead" }, spans(said, { names: axes }));

/** @param {Sent.Compiled} compiled */
function table({ rows, axes }) {
  const cells = (/** @type {Sent.Compiled["rows"][number]} */ [name, over, predicted, real]) =>
    h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        name,
        over?.map((axis) => [" ", h("b", { class: axisClass(Math.max(0, axes.indexOf(axis))) }, axis)]),
      ),
      h("td", { class: "jsm-num jsm-quiet" }, predicted),
      h("td", { class: "jsm-num" }, real),
    );
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "on one device"),
    number("predicted", "From the plan, before compiling"),
    number("compiled", "Read from the compiled program"),
  );
  return h("table", { class: "jsm-table jsm-ex-table" }, h("thead", {}, head), h("tbody", {}, rows.map(cells)));
}
