// A bar for each set of axes, with the kinds of collectives that it is made of.

import { h, s } from "../shared/dom.js";
import { bytes, count, seconds, share, UNKNOWN } from "../shared/format.js";
import { least, number, over, pieces, SHORT } from "../shared/kinds.js";
import { bytesNodes } from "../shared/text.js";
import { hidden, merged, WAITED, weigher } from "./lines.js";

/** @import { Part, Weigher } from "./lines.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @typedef {Part & { kinds: Part[] }} PartSet over a set of axes, with the parts of each kind */

const BAR = 13; // px

/**
 * The sets of axes with what is sent over each and how long that takes, most first.
 *
 * @param {Sent.Communication} communication
 * @param {Mesh} mesh
 */
export function overAxes(communication, mesh) {
  const { rows, total, step_s: step, between } = communication;
  const { timed, weight } = weigher(rows);
  const told = (/** @type {Part} */ part) => (timed ? seconds(part.seconds) : bytes(part.sent));
  const sets = setsOf(rows, weight);
  const most = Math.max(...sets.map(weight)) || 1;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col", title: "Mesh axes along which devices talk, and the devices along each" }, "over axes"),
    timed && [number("predicted", WAITED), number("of step", "Of the predicted step")],
    number("sent", "Bytes that one device sends per step, by collectives that run on a ring"),
    between && number(between, "Bytes per step that one of them sends to others, on rings that go through each once"),
    timed ? null : number("share", "Of all bytes that one device sends per step"),
    h(
      "th",
      { scope: "col", class: "jsm-wide", title: timed ? "Predicted time, by kind" : "Bytes sent, by kind" },
      "by collective",
    ),
  );
  const body = sets.map((set) =>
    h(
      "tr",
      {},
      h("td", {}, axesText(set, mesh)),
      timed && [
        h("td", { class: "jsm-num", title: hidden(set) }, least(seconds(set.seconds), set.exact)),
        h("td", { class: "jsm-num" }, share(step && set.seconds !== null ? set.seconds / step : null)),
      ],
      h("td", { class: "jsm-num" }, least(bytesNodes(set.sent), set.exact)),
      between &&
        h("td", { class: "jsm-num" }, set.leaving === null ? UNKNOWN : least(bytesNodes(set.leaving), set.exact)),
      timed ? null : h("td", { class: "jsm-num" }, share(total ? set.sent / total : 0)),
      h("td", {}, bar(set, weight, most, told), h("div", { class: "jsm-small jsm-quiet" }, list(set, told))),
    ),
  );
  const named = { class: "jsm-table jsm-over-axes", "aria-label": "What is sent over each set of mesh axes" };
  return [h("table", named, h("thead", {}, head), h("tbody", {}, body)), waysOf(communication, mesh)];
}

/**
 * How what is sent goes along each axis: `data: ICI ring, both directions, 90 GB/s; 2 hops from end to end`.
 *
 * @param {Sent.Communication} communication
 * @param {Mesh} mesh
 */
function waysOf({ ways }, mesh) {
  const lines = ways.map(([axis, way]) => h("div", {}, over([axis], null, mesh), `: ${way}`));
  return lines.length ? h("div", { class: "jsm-ways jsm-small jsm-quiet" }, lines) : null;
}

/**
 * Collectives by axes, of which `kinds` has those of each kind, both most first.
 *
 * @param {Sent.Collective[]} rows
 * @param {Weigher["weight"]} weight
 */
function setsOf(rows, weight) {
  const sets = merged(rows, ({ axes }) => (axes === null ? "other" : axes.join()));
  const kinds = (/** @type {Part} */ set) => merged(set.rows, ({ kind }) => kind).sort((a, b) => weight(b) - weight(a));
  const found = sets.map((set) => ({ ...set, kinds: kinds(set) }));
  return found.sort((a, b) => weight(b) - weight(a) || b.sent - a.sent);
}

/**
 * `data 4 model 2`.
 *
 * @param {Part} set
 * @param {Mesh} mesh
 */
function axesText({ axes, size }, mesh) {
  if (axes === null) return over(null, size, mesh);
  return axes.map((axis, i) => [i ? " " : null, h("b", {}, over([axis], null, mesh)), ` ${count(mesh.sizes[axis])}`]);
}

/**
 * @param {PartSet} set
 * @param {Weigher["weight"]} weight
 * @param {number} most
 * @param {(part: Part) => string} told
 */
function bar(set, weight, most, told) {
  const parts = set.kinds.map((each) => ({ kind: each.kind ?? "", axes: set.axes, size: (100 * weight(each)) / most }));
  const label = `${told(set)}: ${set.kinds.map((each) => `${each.kind} ${told(each)}`).join(", ")}`;
  return s("svg", { width: "100%", height: BAR, role: "img", "aria-label": label }, pieces(parts, BAR));
}

/**
 * `AG all-gather 14.3 ms, RS reduce-scatter 7.15 ms`.
 *
 * @param {PartSet} set
 * @param {(part: Part) => string} told
 */
function list({ kinds }, told) {
  return kinds.map((each, i) => {
    const name = SHORT[each.kind ?? ""];
    const short = name ? [h("b", {}, name), " "] : null;
    const comma = i < kinds.length - 1 ? ", " : null;
    return [h("span", { class: "jsm-kind" }, short, `${each.kind} ${told(each)}`), comma];
  });
}
