// Every collective of a step whose source is not known, those that send most first.

import { h, s } from "../shared/dom.js";
import { count, seconds, share, UNKNOWN } from "../shared/format.js";
import { least, number, over, piece } from "../shared/kinds.js";
import { more } from "../shared/more.js";
import { bytesNodes } from "../shared/text.js";
import { hidden, moreSent, part, WAITED, weigher } from "./lines.js";

/** @import { Part } from "./lines.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

const ROWS = 60; // listed at first
const BAR = [72, 9]; // px

const RING =
  "What one device sends per step, all of them together, on a ring of n devices: an all-reduce 2(n\u22121)/n of its" +
  " array, an all-gather, reduce-scatter or all-to-all (n\u22121)/n, a collective-permute all of it";

/**
 * The table of collectives, and a button for those that it leaves out.
 *
 * @param {Sent.Communication} communication
 * @param {Mesh} mesh
 */
export function collectives({ rows }, mesh) {
  const { timed, weight } = weigher(rows);
  const lined = rows.some((row) => row.line !== null || row.text !== null);
  const parts = rows.map((row) => part([row]));
  const most = Math.max(...parts.map(weight)) || 1;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "collective"),
    h("th", { scope: "col", title: "The mesh axes along which the devices of a group lie" }, "over"),
    number("count", "How often it runs per step, loop trips multiplied in"),
    number("bytes each", "Size on one device of the gathered array, or of the one before it is reduced"),
    number("sent per device", RING),
    timed ? number("predicted", WAITED) : number("share", "Of all bytes that one device sends per step"),
    h("td", {}),
    lined ? number("line", "Line of the code that it comes from") : null,
    lined ? h("th", { scope: "col", class: "jsm-source" }, "source") : null,
  );
  const made = (/** @type {Part} */ moved) => {
    const [row] = moved.rows;
    return h(
      "tr",
      {},
      h("td", { class: "jsm-collective", title: row.kind }, row.kind),
      h("td", { class: "jsm-over" }, over(row.axes, row.group_size, mesh)),
      h("td", { class: "jsm-num" }, least(count(row.count), row.exact)),
      h("td", { class: "jsm-num" }, bytesNodes(row.bytes)),
      h("td", { class: "jsm-num" }, least(bytesNodes(row.wire_bytes), row.exact)),
      h(
        "td",
        { class: "jsm-num", title: hidden(moved) },
        timed ? least(seconds(row.seconds), row.exact) : share(row.share),
      ),
      h("td", { class: "jsm-part" }, bar(row, weight(moved) / most)),
      lined ? [h("td", { class: "jsm-num" }, row.short ?? UNKNOWN), source(row)] : null,
    );
  };
  const body = h("tbody", {}, parts.slice(0, ROWS).map(made));
  const named = { class: "jsm-table jsm-collectives", "aria-label": "Collectives" };
  const rest = parts.slice(ROWS);
  return [h("table", named, h("thead", {}, head), body), more(moreSent(rest), rest, made, body)];
}

/**
 * @param {Pick<Sent.Collective, "kind" | "axes">} row
 * @param {number} size
 */
const bar = ({ kind, axes }, size) =>
  s("svg", { width: BAR[0], height: BAR[1], "aria-hidden": "true" }, piece(kind, axes, 0, 100 * size, BAR[1]));

/** @param {Sent.Collective} row */
const source = ({ text }) => h("td", { class: "jsm-source", title: text }, text === null ? null : h("code", {}, text));
