// What a reader sees first: the mesh, the verdict in words, the key figures, and what to change.

import { h } from "../shared/dom.js";
import { axisClass } from "../shared/axes.js";
import { copyable, sign, spans } from "../shared/text.js";
import { mark } from "./marks.js";
import { meshGlyph } from "./meshglyph.js";

const PATHS = 12; // leaves that a sentence of the check names
const ADVICE = 4; // pieces of advice shown at first

/** The header of a report. */
export function view(data, mesh, selection) {
  return h(
    "header",
    { class: "jsm-header" },
    title(data, mesh),
    verdict(data, mesh, selection),
    data.notes.map((note) => h("p", { class: "jsm-small jsm-quiet" }, note)),
    check(data, selection),
    h("div", { class: "jsm-figures" }, data.figures.map((figure) => keyFigure(figure, data, selection))),
    advice(data.advice),
  );
}

function title({ title, memory }, mesh) {
  const axes = mesh.names.map((name, i) => [
    i ? " " : null,
    h("span", { class: axisClass(i) }, name),
    `=${mesh.sizes[i]}`,
  ]);
  return h(
    "div",
    { class: "jsm-title" },
    meshGlyph(mesh, memory),
    h("span", { class: "jsm-strategy" }, title.strategy),
    title.options ? h("code", {}, title.options) : null,
    h("span", { class: "jsm-mono" }, axes),
    h("span", { class: "jsm-quiet" }, mesh.text),
    title.name ? h("span", { class: "jsm-small jsm-quiet jsm-name" }, title.name) : null,
  );
}

function verdict({ verdict, memory }, mesh, selection) {
  if (!verdict.spans.length) return null;
  const open = memory && (() => selection.select({ tab: "memory", device: memory.groups[0].top }));
  return h(
    "p",
    { class: "jsm-verdict" },
    verdict.ok ? null : [sign("error"), " "],
    spans(verdict.spans, mesh, open),
  );
}

/** What a check found beyond its figure: leaves that differ, and those that only rounding moves. */
function check({ check, leaves }, selection) {
  const lines = check?.lines.filter(([, paths]) => paths.length) ?? [];
  const index = new Map(leaves.path.map((path, i) => [path, i]));
  return lines.map(([sentence, paths]) => {
    const named = paths.slice(0, PATHS).flatMap((path, i) => [i ? ", " : " ", leaf(path, index, selection)]);
    const more = paths.length > PATHS ? ` and ${paths.length - PATHS} more` : null;
    return h("p", { class: "jsm-small jsm-quiet" }, sentence, named, more);
  });
}

function leaf(path, index, selection) {
  if (!index.has(path)) return h("code", {}, path);
  const open = () => selection.select({ tab: "layout", leaf: index.get(path) });
  return h("button", { type: "button", class: "jsm-link", onclick: open }, h("code", {}, path));
}

function keyFigure(figure, data, selection) {
  const [number, unit] = figure.value.split("\u202f");
  const parts = [
    h("span", { class: "jsm-figure-label" }, capital(figure.label)),
    h(
      "span",
      { class: "jsm-figure-value" },
      figure.sign ? [sign(figure.sign, null), " "] : null,
      number,
      unit ? h("span", { class: "jsm-u" }, unit) : null,
    ),
    h("span", { class: "jsm-figure-note" }, figure.note),
    mark(figure.mark),
  ];
  if (!data.tabs.some((tab) => tab.id === figure.opens)) return h("div", { class: "jsm-figure" }, parts);
  const open = () => selection.select({ tab: figure.opens });
  return h("button", { type: "button", class: "jsm-figure", onclick: open }, parts);
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function advice(list) {
  if (!list.length) return null;
  const items = list.map(piece);
  const hidden = items.slice(ADVICE);
  for (const item of hidden) item.hidden = true;
  const more = h("button", { type: "button", class: "jsm-button", onclick: show }, `${hidden.length} more`);

  function show() {
    for (const item of hidden) item.hidden = false;
    hidden[0].tabIndex = -1;
    hidden[0].focus();
    more.remove();
  }

  return h("div", { class: "jsm-advice" }, h("ul", {}, items), hidden.length ? more : null);
}

function piece({ level, head, rest, fix }) {
  return h(
    "li",
    {},
    sign(level),
    h(
      "div",
      {},
      head ? [h("b", {}, head), " "] : null,
      rest,
      fix ? h("div", { class: "jsm-fix" }, copyable(fix)) : null,
    ),
  );
}
