// A bar for each set of axes, with the kinds of collectives that it is made of.

import { h, s } from "../shared/dom.js";
import { bytes, count, share } from "../shared/format.js";
import { bytesNodes } from "../shared/text.js";
import { SHORT, number, over, piece } from "./kinds.js";

const BAR = 13; // px
const SEAM = 0.75;

/** The sets of axes with what is sent over each, most first. */
export function overAxes({ rows, total }, mesh) {
  const sets = setsOf(rows);
  const most = Math.max(1, sets[0].sent);
  const head = h(
    "tr",
    {},
    h("th", { scope: "col", title: "Mesh axes along which devices talk, and the devices along each" }, "over axes"),
    number("sent", "Bytes that one device sends per step, by collectives that run on a ring"),
    number("share", "Of all bytes that one device sends per step"),
    h("th", { scope: "col", class: "jsm-wide", title: "The bytes sent, by kind of collective" }, "by collective"),
  );
  const body = sets.map((set) =>
    h(
      "tr",
      {},
      h("td", {}, axesText(set, mesh)),
      h("td", { class: "jsm-num" }, bytesNodes(set.sent)),
      h("td", { class: "jsm-num" }, share(total ? set.sent / total : 0)),
      h("td", {}, bar(set, most), h("div", { class: "jsm-small jsm-quiet" }, told(set))),
    ),
  );
  const named = { class: "jsm-table jsm-over-axes", "aria-label": "Bytes sent over each set of mesh axes" };
  return h("table", named, h("thead", {}, head), h("tbody", {}, body));
}

/** Collectives by axes: `sent` bytes, of which `kinds` has those of each kind, both most first. */
function setsOf(rows) {
  const sets = new Map();
  for (const { kind, axes, group_size: size, wire_bytes: sent } of rows) {
    const key = axes === null ? "other" : axes.join();
    if (!sets.has(key)) sets.set(key, { axes, size, sent: 0, kinds: new Map() });
    const set = sets.get(key);
    if (set.size !== size) set.size = null;
    set.sent += sent;
    set.kinds.set(kind, (set.kinds.get(kind) ?? 0) + sent);
  }
  const found = [...sets.values()].map((set) => ({ ...set, kinds: [...set.kinds].sort(([, a], [, b]) => b - a) }));
  return found.sort((a, b) => b.sent - a.sent);
}

/** `data 4 model 2`. */
function axesText({ axes, size }, mesh) {
  if (axes === null) return over(null, size, mesh);
  return axes.map((axis, i) => [i ? " " : null, h("b", {}, over([axis], null, mesh)), ` ${count(mesh.sizes[axis])}`]);
}

function bar({ axes, sent, kinds }, most) {
  let at = 0;
  const pieces = kinds.map(([kind, size]) => {
    const from = at;
    at += (100 * size) / most;
    return [
      piece(kind, axes, from, at - from, BAR),
      from > 0 ? s("rect", { x: `${from}%`, width: SEAM, height: BAR, fill: "var(--jsm-bg)" }) : null,
    ];
  });
  const label = `${bytes(sent)}: ${kinds.map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ")}`;
  return s("svg", { width: "100%", height: BAR, role: "img", "aria-label": label }, pieces);
}

/** `AG all-gather 474 MiB, RS reduce-scatter 222 MiB`. */
function told({ kinds }) {
  return kinds.map(([kind, size], i) => {
    const short = SHORT[kind] ? [h("b", {}, SHORT[kind]), " "] : null;
    const comma = i < kinds.length - 1 ? ", " : null;
    return [h("span", { class: "jsm-kind" }, short, `${kind} ${bytes(size)}`), comma];
  });
}
