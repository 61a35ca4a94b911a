// What a reader sees first: the mesh, the verdict in words, the key figures, and what to change.

import { axisClass } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { lineNamed } from "../shared/lines.js";
import { axis, copyable, sign, spans } from "../shared/text.js";
import { named } from "./check.js";
import { mark } from "./marks.js";
import { meshGlyph } from "./meshglyph.js";
import { options } from "./options.js";
import { timeStrip } from "./strip.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

const FAILED = 12; // leaves that a sentence of the check names

/**
 * The header of a report.
 *
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
export function view(data, mesh, selection) {
  return h(
    "header",
    { class: "jsm-header", role: "group", "aria-label": "Summary" }, // not the page's banner
    h(
      "div",
      { class: "jsm-head" },
      meshGlyph(mesh, data.memory),
      h("div", { class: "jsm-head-words" }, title(data, mesh), verdict(data, mesh, selection)),
    ),
    data.notes.length ? h("p", { class: "jsm-small jsm-quiet" }, data.notes.join(" ")) : null,
    named(data.check?.lines, FAILED, data, selection),
    timeStrip(data.time, mesh),
    figures(data, mesh, selection),
    options(data.options),
    advice(data),
  );
}

/**
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 */
function title({ title }, mesh) {
  const axes = mesh.names.map((name, i) => [
    i ? " " : null,
    h("span", { class: axisClass(i) }, name),
    `=${mesh.sizes[i]}`,
  ]);
  return h(
    "div",
    { class: "jsm-title" },
    h("span", { class: "jsm-strategy" }, title.strategy),
    title.options ? h("code", {}, title.options) : null,
    h("span", { class: "jsm-mono" }, axes),
    h("span", { class: "jsm-quiet" }, mesh.text),
    title.name ? h("span", { class: "jsm-small jsm-quiet jsm-name" }, title.name) : null,
  );
}

/**
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
function verdict({ verdict, memory, communication }, mesh, selection) {
  if (!verdict.spans.length) return null;
  const opens = {
    memory: () => memory && (() => selection.select({ tab: "memory", device: memory.groups[0].top })),
    line: (/** @type {string} */ text) => {
      const line = communication && lineNamed(communication, text);
      return line && (() => selection.select({ tab: "communication", line }));
    },
  };
  return h("p", { class: "jsm-verdict" }, verdict.ok ? null : [sign("error"), " "], spans(verdict.spans, mesh, opens));
}

/**
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
function figures(data, mesh, selection) {
  if (!data.figures.length) return null;
  return h(
    "div",
    { class: "jsm-figures" },
    data.figures.map((figure) => keyFigure(figure, data, mesh, selection)),
  );
}

/**
 * @param {Sent.Figure} figure
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
function keyFigure(figure, data, mesh, selection) {
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
    h("span", { class: "jsm-figure-note" }, note(figure, mesh)),
    mark(figure.mark),
  ];
  if (!data.tabs.some((tab) => tab.id === figure.opens)) return h("div", { class: "jsm-figure" }, parts);
  const open = () => selection.select({ tab: figure.opens });
  return h("button", { type: "button", class: "jsm-figure", onclick: open }, parts);
}

/**
 * The note, broken into lines between its parts; where its mark has the hues of axes, their names have them too.
 *
 * @param {Sent.Figure} figure
 * @param {Mesh} mesh
 */
function note({ note, mark }, mesh) {
  const hued = (/** @type {string} */ word) =>
    mesh.names.includes(word) ? axis(mesh, mesh.names.indexOf(word)) : word;
  return note
    .split(/(?<=,) /)
    .map((part, i) => [
      i ? " " : null,
      h("span", { class: "jsm-note-part" }, mark?.kind === "axes" ? part.split(/([ +])/).map(hued) : part),
    ]);
}

/** @param {string} text */
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/**
 * The hints, those that are folded behind a button.
 *
 * @param {Sent.Report} data
 */
function advice({ advice: list, hints }) {
  if (!list.length) return null;
  const items = list.map(piece);
  const hidden = items.slice(hints);
  for (const item of hidden) item.hidden = true;
  const more = h(
    "button",
    { type: "button", class: "jsm-button jsm-more-hints", onclick: show },
    `${hidden.length} more`,
  );
  if (hidden.length) items[hints - 1].append(more);

  function show() {
    for (const item of hidden) item.hidden = false;
    hidden[0].tabIndex = -1;
    hidden[0].focus();
    more.remove();
  }

  return h("div", { class: "jsm-advice" }, h("ul", {}, items));
}

/**
 * A hint on one line, which a click shows whole.
 *
 * @param {Sent.Advice} advice
 */
function piece({ level, head, rest, fix }) {
  const attributes = { type: "button", class: "jsm-hint", "aria-expanded": "false", onclick: toggle };
  const said = h("button", attributes, head ? [h("b", {}, head), " "] : null, rest);
  const item = h("li", {}, sign(level), said, fix ? h("div", { class: "jsm-fix" }, copyable(fix)) : null);

  function toggle() {
    said.setAttribute("aria-expanded", String(item.classList.toggle("jsm-whole")));
  }

  return item;
}
