// The leaves that two trials lay out differently, those that differ most first.

import { axisClass } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { bytes, count, counted, UNKNOWN } from "../shared/format.js";
import { number } from "../shared/kinds.js";
import { more } from "../shared/more.js";
import { figure, letter } from "./cells.js";
import { DIFFERENCE, difference, NOT_KNOWN } from "./parts.js";

/** @import * as Sent from "../shared/payload_types.js" */

/** @typedef {ReturnType<typeof differing>[number]} Differing a leaf, or leaves, by trial */

const NAME = "Leaves that lie differently";
const ROWS = 12; // listed at first
const LAID = "How the leaf is cut: the mesh axis of each dimension";
const HELD = "Bytes of these leaves on the device that holds most of them";

/**
 * A sentence, the table of leaves, and a button for those that it leaves out.
 *
 * @param {Sent.LayoutColumns} known
 * @param {number[]} pair
 * @param {string[]} axes
 */
export function leaves(known, pair, axes) {
  const title = h("h3", {}, NAME);
  const none = (/** @type {string} */ why) =>
    h("div", { class: "jsm-cmp-leaves" }, title, h("p", { class: "jsm-quiet" }, why));
  if (pair.some((i) => known.layout[i] === null)) return none(NOT_KNOWN);
  const rows = differing(known, pair[0], pair[1]);
  if (!rows.length) return none("None: all lie alike.");
  const many = rows.reduce((sum, row) => sum + row.count + row.follow, 0);
  const follow = rows.reduce((sum, row) => sum + row.follow, 0);
  const like = follow ? `, ${count(follow)} of them the optimizer's, which lie as the parameters below` : "";
  const said = `${counted(many, "leaf", "leaves")}${like}`;
  const make = (/** @type {Differing} */ row) => drawn(row, known.layouts, axes);
  const left = rows.slice(ROWS);
  const body = h("tbody", {}, rows.slice(0, ROWS).map(make));
  const head = (/** @type {string} */ which) => [
    h("th", { scope: "col", title: LAID }, letter(which)),
    number("per device", HELD),
  ];
  return h(
    "div",
    { class: "jsm-cmp-leaves" },
    title,
    h("p", { class: "jsm-small jsm-quiet" }, said),
    h(
      "table",
      { class: "jsm-table", "aria-label": NAME },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "leaf"), head("A"), head("B"), number(DIFFERENCE))),
      body,
    ),
    more(counted(left.length, "more row"), left, make, body),
  );
}

/**
 * @param {Sent.LayoutColumns} known
 * @param {number} a
 * @param {number} b
 */
function differing({ path, count: members, follow, layout, held }, a, b) {
  return path
    .map((name, i) => ({
      name,
      count: members[i],
      follow: follow[i],
      layout: [layout[a]?.[i] ?? null, layout[b]?.[i] ?? null],
      held: [held[a]?.[i] ?? null, held[b]?.[i] ?? null],
    }))
    .filter(({ layout: [one, two], held: [x, y] }) => one !== two || x !== y)
    .sort((one, two) => gap(two) - gap(one));
}

/** @type {(row: { held: (number | null)[] }) => number} */
const gap = ({ held: [a, b] }) => Math.abs((a ?? 0) - (b ?? 0));

/**
 * @param {Differing} row
 * @param {Sent.LayoutColumns["layouts"]} layouts
 * @param {string[]} axes
 */
function drawn({ name, count: members, layout, held }, layouts, axes) {
  const none = () => h("span", { class: "jsm-quieter" }, UNKNOWN);
  const laid = (/** @type {number} */ i) => [
    h("td", {}, layout[i] === null ? none() : type(layouts[layout[i]], axes)),
    h("td", { class: "jsm-num" }, figure(bytes(held[i]))),
  ];
  const times = members > 1 ? h("span", { class: "jsm-quiet" }, ` \u00d7${count(members)}`) : null;
  return h(
    "tr",
    {},
    h("th", { scope: "row", class: "jsm-mono", title: name }, breakable(name, "."), times),
    laid(0),
    laid(1),
    h("td", { class: "jsm-num" }, difference(held[0], held[1])),
  );
}

/**
 * `f32[768@data,3072]`, each axis in its hue; it may break behind a comma.
 *
 * @param {Sent.LayoutColumns["layouts"][number]} parts
 * @param {string[]} axes
 */
function type(parts, axes) {
  const named = (/** @type {number} */ axis) => h("span", { class: axisClass(axis) }, axes[axis]);
  const nodes = parts.map(([text, axis]) => (axis === null ? breakable(text, ",") : named(axis)));
  return h("span", { class: "jsm-mono" }, nodes);
}

/**
 * @param {string} text
 * @param {string} mark
 */
const breakable = (text, mark) => text.split(mark).flatMap((part, i) => (i ? [mark, h("wbr"), part] : [part]));
