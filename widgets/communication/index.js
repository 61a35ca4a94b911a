// What moves between devices in one step: over which axes, by which collectives.

import { h, s } from "../shared/dom.js";
import { axisClass, hue } from "../shared/axes.js";
import { bytes, count, counted, seconds, share } from "../shared/format.js";
import { bytesNodes, spans } from "../shared/text.js";

const SHORT = {
  "all-gather": "AG",
  "all-reduce": "AR",
  "reduce-scatter": "RS",
  "all-to-all": "A2A",
  "collective-permute": "CP",
};
const OPACITY = { "all-gather": 1, "all-reduce": 0.8, "reduce-scatter": 0.62, "all-to-all": 0.45, "collective-permute": 0.35 };
const OTHER = 0.3;
const ROWS = 60; // collectives listed at first
const BAR = 72; // px of the largest share

export function view({ communication }, mesh) {
  if (!communication.rows.length) {
    return h("p", { class: "jsm-lead" }, "Nothing moves between devices in this step.");
  }
  return h(
    "div",
    { class: "jsm-communication" },
    h("p", { class: "jsm-lead" }, spans(communication.lead, mesh)),
    overAxes(communication, mesh),
    collectives(communication, mesh),
  );
}

/** A bar for each set of axes, most first, with the kinds of collectives that it is made of. */
function overAxes({ rows, total }, mesh) {
  const sets = new Map();
  for (const row of rows) {
    const key = row.axes === null ? "other" : row.axes.join();
    if (!sets.has(key)) sets.set(key, { axes: row.axes, sent: 0, kinds: new Map() });
    const set = sets.get(key);
    set.sent += row.wire_bytes;
    set.kinds.set(row.kind, (set.kinds.get(row.kind) ?? 0) + row.wire_bytes);
  }
  const listed = [...sets.values()].sort((a, b) => b.sent - a.sent);
  const most = Math.max(1, listed[0].sent);
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "over axes"),
    number("sent", "Bytes that one device sends in a step, if the collective runs on a ring"),
    number("share", "Of all bytes that one device sends"),
    h("th", { scope: "col", class: "jsm-wide" }, "by collective"),
  );
  const body = listed.map((set) =>
    h(
      "tr",
      {},
      h("td", {}, over(set, mesh, true)),
      h("td", { class: "jsm-num" }, bytesNodes(set.sent)),
      h("td", { class: "jsm-num" }, share(total ? set.sent / total : 0)),
      h("td", {}, kinds(set, most)),
    ),
  );
  return h("table", { class: "jsm-table jsm-over-axes" }, h("thead", {}, head), h("tbody", {}, body));
}

function kinds({ axes, sent, kinds }, most) {
  const parts = [...kinds].sort(([, a], [, b]) => b - a);
  let x = 0;
  const bars = parts.map(([kind, size]) => {
    const [from, width] = [(100 * x) / most, (100 * size) / most];
    x += size;
    const fill = axes === null ? "var(--jsm-ink-3)" : hue(axes[0]);
    return s("rect", { x: `${from}%`, y: 0, width: `${width}%`, height: 12, fill, opacity: OPACITY[kind] ?? OTHER, stroke: "var(--jsm-bg)", "stroke-width": 0.75 });
  });
  const label = `${bytes(sent)}: ${parts.map(([kind, size]) => `${kind} ${bytes(size)}`).join(", ")}`;
  const told = parts.map(([kind, size], i) => [
    i ? ", " : null,
    SHORT[kind] ? [h("b", {}, SHORT[kind]), " "] : null,
    `${kind} ${bytes(size)}`,
  ]);
  return [
    s("svg", { width: "100%", height: 12, role: "img", "aria-label": label }, bars),
    h("div", { class: "jsm-small jsm-quiet" }, told),
  ];
}

/** `data 4`, or what is known of groups that match no axes. */
function over({ axes, group_size: size }, mesh, bold = false) {
  if (axes === null) {
    const title = "Its groups of devices match no set of mesh axes";
    return h("span", { title }, size === undefined ? "other groups" : `groups of ${count(size)}`);
  }
  return axes.map((axis, i) => [
    i ? " " : null,
    h(bold ? "b" : "span", { class: axisClass(axis) }, mesh.names[axis]),
    bold ? ` ${mesh.sizes[axis]}` : null,
  ]);
}

/** Every collective, those that send most first. */
function collectives({ rows }, mesh) {
  const timed = rows.some((row) => row.seconds !== null);
  const lined = rows.some((row) => row.line !== null);
  const most = Math.max(...rows.map((row) => row.share), 1e-9);
  const head = h(
    "tr",
    {},
    h("th", { scope: "col" }, "collective"),
    h("th", { scope: "col" }, "over"),
    number("count", "How often it runs in a step, the trips of loops multiplied in"),
    number("bytes each", "Size on one device of the gathered array, or of the one before it is reduced"),
    number("sent per device", "What one device sends for all of them on a ring of n: an all-reduce 2(n\u22121)/n of the array, an all-gather or reduce-scatter (n\u22121)/n"),
    timed ? number("predicted", "Predicted from the links' bandwidth") : null,
    h("th", { scope: "col", colspan: 2 }, "share"),
    lined ? h("th", { scope: "col" }, "line") : null,
  );
  const made = (row) =>
    h(
      "tr",
      {},
      h("td", {}, row.kind),
      h("td", {}, over(row, mesh)),
      h("td", { class: "jsm-num" }, count(row.count)),
      h("td", { class: "jsm-num" }, bytesNodes(row.bytes)),
      h("td", { class: "jsm-num" }, bytesNodes(row.wire_bytes)),
      timed ? h("td", { class: "jsm-num" }, seconds(row.seconds)) : null,
      h("td", { class: "jsm-num jsm-share" }, share(row.share)),
      h("td", { class: "jsm-share-bar" }, shareBar(row, most)),
      lined ? h("td", { class: "jsm-source" }, row.line === null ? "\u2013" : row.line, row.source ? [" ", h("code", { title: row.source }, row.source.trim())] : null) : null,
    );
  const body = h("tbody", {}, rows.slice(0, ROWS).map(made));
  const rest = rows.slice(ROWS);
  const table = h("table", { class: "jsm-table jsm-collectives" }, h("thead", {}, head), body);
  if (!rest.length) return table;
  const sent = bytes(rest.reduce((sum, row) => sum + row.wire_bytes, 0));
  const more = h("button", { type: "button", class: "jsm-button", onclick: show }, `Show ${counted(rest.length, "more", "more")}, ${sent} sent`);

  function show() {
    const first = made(rest[0]);
    first.tabIndex = -1;
    body.append(first, ...rest.slice(1).map(made));
    first.focus();
    more.remove();
  }

  return [table, more];
}

const shareBar = (row, most) =>
  s(
    "svg",
    { width: BAR, height: 9, "aria-hidden": "true" },
    s("rect", {
      width: Math.max(0.75, (BAR * row.share) / most),
      height: 9,
      fill: row.axes === null ? "var(--jsm-ink-3)" : hue(row.axes[0]),
      opacity: OPACITY[row.kind] ?? OTHER,
    }),
  );

const number = (text, title) => h("th", { scope: "col", class: "jsm-num", title }, text);
