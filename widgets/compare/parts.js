// Two trials side by side: memory by role on the fullest device, and what each collective sends.

import { hue } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { bytes, UNKNOWN } from "../shared/format.js";
import { number, over } from "../shared/kinds.js";
import { bar, cell, figure, letter } from "./cells.js";

/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { AxisNames } from "../shared/mesh.js" */

/** @type {Sent.MemoryRole[]} */
const ROLES = ["params", "optimizer", "batch", "temporaries", "other"];
export const DIFFERENCE = "A \u2212 B";
export const NOT_KNOWN = "Not known of both.";
const SENT = "Bytes that one device sends in a step";

/**
 * `+1.2 MiB`, `−3 KiB`, `same`: by how much the first is more than the second.
 *
 * @param {number | null} a
 * @param {number | null} b
 */
export function difference(a, b) {
  if (a === null || b === null) return h("span", { class: "jsm-quieter" }, UNKNOWN);
  if (a === b) return h("span", { class: "jsm-quieter" }, "same");
  return figure(`${a > b ? "+" : ""}${bytes(a - b)}`);
}

/**
 * A table with a column for each of the pair and one for the difference.
 *
 * @param {string} name
 * @param {Child} first
 * @param {Child} rows
 */
function table(name, first, rows) {
  const heads = ["A", "B"].map((which) => number(letter(which)));
  return h(
    "div",
    {},
    h("h3", {}, name),
    h(
      "table",
      { class: "jsm-table jsm-cmp-two", "aria-label": name },
      h("thead", {}, h("tr", {}, first, heads, number(DIFFERENCE))),
      h("tbody", {}, rows),
    ),
  );
}

/** @type {(size: number | null, most: number, fills: string[], exact?: boolean) => HTMLElement} */
const part = (size, most, fills, exact = true) => cell(bytes(size), size ? bar(size / most, fills) : null, exact);

/** @param {string} name */
const lacking = (name) => h("div", {}, h("h3", {}, name), h("p", { class: "jsm-quiet" }, NOT_KNOWN));

/**
 * Memory by role on the fullest device of each.
 *
 * @param {Sent.TrialDetails["memory"]} known
 * @param {number[]} pair
 */
export function memory(known, pair) {
  const name = "Memory of the fullest device";
  const two = pair.flatMap((i) => known[i] ?? []);
  if (two.length < pair.length) return lacking(name);
  const most = Math.max(...two.flatMap((one) => Object.values(one)));
  /** @type {(role: keyof Sent.RoleMemory, fill: string | null) => HTMLElement} */
  const row = (role, fill) =>
    h(
      "tr",
      { class: fill ? null : "jsm-cmp-total" },
      h("th", { scope: "row" }, fill && h("i", { class: `jsm-key jsm-key-${role}` }), role),
      two.map((one) => h("td", { class: "jsm-num" }, part(one[role], most, [fill ?? "var(--jsm-ink-2)"]))),
      h("td", { class: "jsm-num" }, difference(two[0][role], two[1][role])),
    );
  const held = ROLES.filter((role) => two.some((one) => one[role] !== 0));
  const rows = [...held.map((role) => row(role, `var(--jsm-${role})`)), row("peak", null)];
  return table(name, h("th", { scope: "col" }, "role"), rows);
}

/**
 * What one device sends by each kind of collective over each set of axes, most first.
 *
 * @param {Sent.TrialDetails["moved"]} known
 * @param {number[]} pair
 * @param {AxisNames} names
 */
export function moved(known, pair, names) {
  const name = "Sent per device and step";
  const two = pair.flatMap((i) => (known[i] ? [known[i]] : []));
  if (two.length < pair.length) return lacking(name);
  const rows = together(two);
  if (!rows.length) return h("div", {}, h("h3", {}, name), h("p", { class: "jsm-quiet" }, "Neither sends anything."));
  const most = Math.max(...rows.flatMap(({ sent }) => sent)) || 1;
  const row = (/** @type {ReturnType<typeof together>[number]} */ { kind, axes, sent, exact }) => {
    const fills = axes?.map(hue) ?? ["var(--jsm-ink-3)"];
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, kind, " ", over(axes, null, names)),
      sent.map((size, i) => h("td", { class: "jsm-num" }, size ? part(size, most, fills, exact[i]) : cell(UNKNOWN))),
      h("td", { class: "jsm-num" }, difference(sent[0], sent[1])),
    );
  };
  const sums = [0, 1].map((i) => rows.reduce((sum, { sent }) => sum + sent[i], 0));
  const all = h(
    "tr",
    { class: "jsm-cmp-total" },
    h("th", { scope: "row" }, "all"),
    sums.map((size) => h("td", { class: "jsm-num" }, figure(bytes(size)))),
    h("td", { class: "jsm-num" }, difference(sums[0], sums[1])),
  );
  return table(name, h("th", { scope: "col", title: SENT }, "collective"), [
    rows.map(row),
    rows.length > 1 ? all : null,
  ]);
}

/**
 * One row for each kind over each set of axes; a collective that one of the two has not sends nothing there.
 *
 * @param {Sent.Moved[][]} two
 */
function together(two) {
  /** @type {Map<string, { kind: string, axes: number[] | null, sent: number[], exact: boolean[] }>} */
  const rows = new Map();
  two.forEach((found, i) => {
    for (const [kind, axes, size, , , exact] of found) {
      const key = `${kind} ${axes?.join()}`;
      const row = rows.get(key) ?? { kind, axes, sent: [0, 0], exact: [true, true] };
      rows.set(key, row);
      row.sent[i] = size;
      row.exact[i] = exact;
    }
  });
  return [...rows.values()].sort((a, b) => Math.max(...b.sent) - Math.max(...a.sent));
}
