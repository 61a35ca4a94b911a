// Every collective of the step, those that send most first.

import { h, s } from "../shared/dom.js";
import { UNKNOWN, bytes, count, seconds, share } from "../shared/format.js";
import { bytesNodes } from "../shared/text.js";
import { number, over, piece } from "./kinds.js";

const ROWS = 60; // listed at first
const BAR = [72, 9]; // px

const RING =
  "What one device sends per step, all of them together, on a ring of n devices: an all-reduce 2(n\u22121)/n of its" +
  " array, an all-gather, reduce-scatter or all-to-all (n\u22121)/n, a collective-permute all of it";

/** The table of collectives, and a button for those that it leaves out. */
export function collectives({ rows }, mesh) {
  const timed = rows.some((row) => row.seconds !== null);
  const lined = rows.some((row) => row.line !== null || row.source !== null);
  const weight = timed ? (row) => row.seconds ?? 0 : (row) => row.share;
  const most = Math.max(...rows.map(weight)) || 1;
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "collective"),
    h("th", { scope: "col", title: "The mesh axes along which the devices of a group lie" }, "over"),
    number("count", "How often it runs per step, loop trips multiplied in"),
    number("bytes each", "Size on one device of the gathered array, or of the one before it is reduced"),
    number("sent per device", RING),
    timed
      ? number("predicted", "Time per step, predicted from the bandwidth of the links")
      : number("share", "Of all bytes that one device sends per step"),
    h("td", {}),
    lined ? number("line", "Line of the cell that it comes from") : null,
    lined ? h("th", { scope: "col", class: "jsm-source" }, "source") : null,
  );
  const made = (row) =>
    h(
      "tr",
      {},
      h("td", { class: "jsm-collective", title: row.kind }, row.kind),
      h("td", { class: "jsm-over" }, over(row.axes, row.group_size, mesh)),
      h("td", { class: "jsm-num" }, count(row.count)),
      h("td", { class: "jsm-num" }, bytesNodes(row.bytes)),
      h("td", { class: "jsm-num" }, bytesNodes(row.wire_bytes)),
      h("td", { class: "jsm-num" }, timed ? seconds(row.seconds) : share(row.share)),
      h("td", { class: "jsm-part" }, part(row, weight(row) / most)),
      lined ? [h("td", { class: "jsm-num" }, row.line ?? UNKNOWN), source(row)] : null,
    );
  const body = h("tbody", {}, rows.slice(0, ROWS).map(made));
  const named = { class: "jsm-table jsm-collectives", "aria-label": "Collectives" };
  return [h("table", named, h("thead", {}, head), body), more(rows.slice(ROWS), made, body)];
}

const part = ({ kind, axes }, size) =>
  s("svg", { width: BAR[0], height: BAR[1], "aria-hidden": "true" }, piece(kind, axes, 0, 100 * size, BAR[1]));

const source = ({ source: text }) =>
  h("td", { class: "jsm-source", title: text }, text === null ? null : h("code", {}, text));

/** `39 more send 12.4 MiB`, and a button that lists them. */
function more(rows, made, body) {
  if (!rows.length) return null;
  const sent = bytes(rows.reduce((sum, row) => sum + row.wire_bytes, 0));
  const said = `${count(rows.length)} more ${rows.length === 1 ? "sends" : "send"} ${sent}`;
  const button = h("button", { type: "button", class: "jsm-button", onclick: show }, "Show all");
  const line = h("p", { class: "jsm-more jsm-small jsm-quiet" }, said, button);

  function show() {
    const added = rows.map(made);
    added[0].tabIndex = -1; // the keyboard goes on where the button was
    body.append(...added);
    added[0].focus();
    line.remove();
  }

  return line;
}
