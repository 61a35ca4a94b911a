// What led an automatic search to its choice: the lines that run it, the usual decision path, what was not compiled.

import { h } from "../shared/dom.js";
import { count } from "../shared/format.js";
import { number } from "../shared/kinds.js";
import { copyable } from "../shared/text.js";
import { meshNodes, nameNodes } from "./cells.js";

/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */

const NEXT = "the next question";
const AT_LEAST = "What a step's products and the bytes that it must send take, by its plan";
const NEEDS = "Memory of the fullest device, estimated from the traced step";

/**
 * The lines to paste, each with what it runs.
 *
 * @param {Sent.Choice} choice
 */
export const runs = ({ runs: lines }) =>
  lines.length === 0
    ? null
    : h(
        "dl",
        { class: "jsm-found-runs" },
        lines.map(([name, line]) => [h("dt", {}, `Run ${name} as`), h("dd", {}, copyable(line))]),
      );

/**
 * The questions below each other, each beside what its answers lead to; the way that the step takes is strong.
 *
 * @param {Sent.Choice} choice
 */
export function path({ path: questions, path_title: title, agreement }) {
  if (!questions.length) return null;
  return folding(title, true, [h("ol", { class: "jsm-found-path" }, questions.map(question)), h("p", {}, agreement)]);
}

/** @param {Sent.Question} asked */
function question({ asks, because, way, branches }) {
  const answers = branches.map(([answer, leaf, taken]) =>
    h(
      "li",
      { class: `jsm-found-${taken}` },
      h("span", { class: "jsm-quiet" }, answer),
      h("span", { class: "jsm-found-arm", "aria-hidden": "true" }),
      leaf === null ? h("span", {}, NEXT) : h("span", { class: "jsm-found-leaf jsm-mono" }, leaf),
    ),
  );
  return h(
    "li",
    {},
    h(
      "div",
      { class: `jsm-found-asks jsm-found-${way}` },
      h("div", {}, asks),
      h("div", { class: "jsm-small jsm-quiet" }, because),
    ),
    h("ul", {}, answers),
  );
}

/**
 * A row for each candidate that was not compiled, under what ruled it out.
 *
 * @param {Sent.Choice} choice
 * @param {string[]} axes
 */
export function others({ others: groups, others_title: title, others_open: open }, axes) {
  if (!groups.length) return null;
  const head = h(
    "tr",
    {},
    ["strategy", "mesh"].map((name) => h("th", { scope: "col" }, name)),
    number("at least", AT_LEAST),
    number("needs about", NEEDS),
  );
  const bodies = groups.map(([fate, alike, left]) =>
    h(
      "tbody",
      {},
      whole(h("b", {}, fate)),
      alike.map(([candidates, why]) => [
        candidates.map((each) => row(each, axes)),
        why ? whole(h("span", { class: "jsm-small jsm-quiet" }, why)) : null,
      ]),
      left ? whole(h("span", { class: "jsm-small jsm-quiet" }, `and ${count(left)} more`)) : null,
    ),
  );
  return folding(
    title,
    open,
    h("table", { class: "jsm-table jsm-found-others", "aria-label": title }, h("thead", {}, head), bodies),
  );
}

/** @param {Child} content */
const whole = (content) => h("tr", { class: "jsm-found-whole" }, h("td", { colspan: 4 }, content));

/**
 * @param {Sent.Candidate} candidate
 * @param {string[]} axes
 */
const row = (candidate, axes) =>
  h(
    "tr",
    {},
    h("td", { class: "jsm-mono" }, nameNodes(candidate)),
    h("td", { class: "jsm-mono" }, meshNodes(candidate, axes)),
    h("td", { class: "jsm-num" }, candidate.bound),
    h(
      "td",
      { class: "jsm-num" },
      candidate.needs,
      candidate.arrays ? h("div", { class: "jsm-small jsm-quiet" }, candidate.arrays) : null,
    ),
  );

/**
 * @param {string} title
 * @param {boolean} open
 * @param {Child} content
 */
const folding = (title, open, content) => h("details", { class: "jsm-found", open }, h("summary", {}, title), content);
