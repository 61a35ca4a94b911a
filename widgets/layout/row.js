// One row of the list, as an element.

import { h, s } from "../shared/dom.js";
import { bytes, counted } from "../shared/format.js";
import { leafAt } from "../shared/mesh.js";
import { axis, bytesNodes, sign, specText, typed } from "../shared/text.js";
import { glyph } from "./glyph.js";
import { marked } from "./search.js";

const BAR = 34; // px of the largest
const VARYING = /(\d+(?:-\d+)?(?:,(?:\d+(?:-\d+)?|\u2026))+|\d+-\d+)/;

/** The header of a role. */
export const roleRow = (row) => [
  h("span", { class: "jsm-twist", "aria-hidden": "true" }, row.open ? "\u25bc" : "\u25b6"),
  h("span", {}, h("b", {}, row.role), " ", h("span", { class: "jsm-small jsm-quiet" }, counted(row.leaves.length, "leaf", "leaves"))),
  h("span", { class: "jsm-small" }, bytesNodes(row.held), " per device"),
];

/** A leaf, or a family of them: how it is cut, its path, its type, and what one device holds. */
export function leafRow(row, data, mesh, { largest, words, failed }) {
  const leaf = leafAt(data, row.leaves[0]);
  const width = Math.max(0.75, (BAR * row.held) / Math.max(1, largest));
  const signs = [
    leaf.short && row.height < 30 ? sign("warning", "not cut as wanted") : null,
    row.leaves.some((each) => failed.has(each)) ? sign("error", "its numbers differ") : null,
  ];
  return [
    glyph(mesh, leaf),
    h("span", { class: "jsm-path" }, twist(row), path(row, words), times(row), signs),
    typed(mesh, leaf),
    h("span", { class: "jsm-held" }, bytesNodes(row.held)),
    s("svg", { width: BAR, height: 8, "aria-hidden": "true" }, s("rect", { width, height: 8, fill: "var(--jsm-ink-3)" })),
    row.height > 30 ? h("span", { class: "jsm-told" }, sign("warning", "warning"), told(leaf, mesh)) : null,
  ];
}

/** All of the row as text, for a hover. */
export function spoken(row, data, mesh) {
  const leaf = leafAt(data, row.leaves[0]);
  const each = row.leaves.length > 1 ? `, ${row.leaves.length} leaves of ${bytes(leaf.held)}` : "";
  return `${row.path}  ${specText(mesh, leaf)}\n${bytes(row.held)} per device${each}`;
}

const twist = ({ open }) =>
  open === null ? null : h("span", { class: "jsm-twist", "aria-hidden": "true" }, open ? "\u25bc" : "\u25b6");

const times = ({ leaves }) => (leaves.length > 1 ? h("span", { class: "jsm-times jsm-quiet" }, `\u00d7${leaves.length}`) : null);

/** Its last two parts never shrink; the parts that the row above has too are quiet. */
function path({ path, shared, kind }, words) {
  const parts = path.split(".");
  const piece = (part, i) => {
    const text = i < parts.length - 1 ? `${part}.` : part;
    return h("span", { class: i < shared ? "jsm-quieter" : null }, kind === "family" ? chips(text, words) : hits(text, words));
  };
  const nodes = parts.map(piece);
  return [h("span", { class: "jsm-path-head" }, nodes.slice(0, -2)), h("span", { class: "jsm-path-tail" }, nodes.slice(-2))];
}

const hits = (text, words) =>
  words.length ? marked(text, words).map(([piece, hit]) => (hit ? h("mark", {}, piece) : piece)) : text;

/** The numbers that vary from member to member, as `0–47`. */
const chips = (text, words) =>
  text
    .split(VARYING)
    .map((piece, i) => (i % 2 ? h("span", { class: "jsm-chip" }, piece.replaceAll("-", "\u2013")) : hits(piece, words)));

function told({ short, why }, mesh) {
  const over = short.wanted.flatMap((index, i) => [i ? " and " : " over ", axis(mesh, index)]);
  const lost = short.lost ? ["; ", h("b", {}, `+${bytes(short.lost)}`), " per device"] : null;
  return h("span", {}, "not cut", over, why ? `: ${why.split("; ")[0]}` : null, lost);
}
