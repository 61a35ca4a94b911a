// What stands below the pictures of an array: what went wrong with it, its sizes, and why it is cut as it is.

import { h } from "../shared/dom.js";
import { bytes, count, counted } from "../shared/format.js";
import { copies, cuts, places, uncutAxes } from "../shared/mesh.js";
import { axis, copyable, placed, sign } from "../shared/text.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Child } from "../shared/dom.js" */
/** @import { LeafList } from "./rows.js" */
/** @import { Leaf, Mesh } from "../shared/mesh.js" */

/**
 * Boxes for numbers that differ and for a cut that was wanted and not made.
 *
 * @param {LeafList} data
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
export function notes(data, mesh, leaf) {
  return [
    data.failed.includes(leaf.index) ? box("error", [h("b", {}, "Its numbers differ from the plain step's.")]) : null,
    leaf.short ? box("warning", [notCut(mesh, leaf), fix(leaf.short)]) : null,
    data.noise.includes(leaf.index)
      ? h("p", { class: "jsm-small jsm-quiet" }, "Its numbers differ by rounding noise only: no error.")
      : null,
  ];
}

/**
 * @param {"warning" | "error" | "info"} kind
 * @param {Child} parts
 */
const box = (kind, parts) =>
  h("div", { class: `jsm-detail-note jsm-detail-note-${kind}` }, sign(kind), h("div", {}, parts));

/** @param {Sent.Short} short */
const fix = ({ fix }) => (fix ? h("div", {}, copyable(fix)) : null);

/**
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
function notCut(mesh, leaf) {
  const { wanted, lost, total, followers } = leaf.short;
  const times = copies(leaf);
  const kept = times > 1 ? ` Each slice is kept ${times === 2 ? "twice" : `${count(times)} times`}: ` : " ";
  const more = followers
    ? `, +${bytes(total)} with ${counted(followers, "optimizer leaf", "optimizer leaves")} like it`
    : "";
  return [
    h("b", {}, "Not cut over ", axesList(mesh, wanted), "."),
    leaf.why ? ` ${sentence(leaf.why)}` : null,
    lost ? [kept, h("b", {}, `+${bytes(lost)} per device`), more, "."] : null,
  ];
}

/** @param {string} text */
const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

/**
 * @param {Mesh} mesh
 * @param {number[]} axes
 */
const axesList = (mesh, axes) =>
  axes.map((index, i) => [i ? (i === axes.length - 1 ? " and " : ", ") : null, axis(mesh, index)]);

/**
 * The leaf's sizes, its copies, and why it is cut as it is.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
export function facts(mesh, leaf) {
  const pieces = cuts(leaf).reduce((a, b) => a * b, 1);
  const part = pieces === 1 ? " (all of it)" : ` (1/${count(pieces)})`;
  const rows = [
    ["whole array", bytes(leaf.bytes)],
    ["per device", [bytes(leaf.held), h("span", { class: "jsm-quiet" }, part)]],
    ["lies", leaf.within.length ? [placed(mesh, [leaf.within]), devicesText(mesh, leaf)] : null],
    ["copies", copiesText(mesh, leaf)],
    ["why", leaf.short ? null : leaf.why],
  ];
  return h(
    "dl",
    { class: "jsm-detail-facts" },
    rows.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/**
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
const devicesText = (mesh, leaf) =>
  h("span", { class: "jsm-quiet" }, ` (${count(places(mesh, leaf).length)} of ${counted(mesh.count, "device")})`);

/**
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
function copiesText(mesh, leaf) {
  const n = copies(leaf);
  if (n === 1) return "1, nothing kept twice";
  if (n === mesh.count) return `${count(n)}, one on every device`;
  return [`${count(n)}, over `, axesList(mesh, uncutAxes(mesh, leaf))];
}
