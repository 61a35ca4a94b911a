// A comparison in a notebook: the trials as a table and as points, the chosen one in words, and what differs in a pair.
// Of an automatic search, which compared what it compiled, what led to its choice as well.

import { paint } from "../shared/axes.js";
import curve from "../shared/curve.css";
import { charts, sample } from "../shared/curve.js";
import { h } from "../shared/dom.js";
import { drawn } from "../shared/page.js";
import { saving } from "../shared/saving.js";
import { copyable, spans } from "../shared/text.js";
import { Choice, follow } from "./choice.js";
import style from "./compare.css";
import found from "./found.css";
import { others, path, runs } from "./found.js";
import { Pair } from "./pair.js";
import { Scatter } from "./scatter.js";
import { Side } from "./side.js";
import { Table } from "./table.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Chosen } from "./choice.js" */
/** @import { Changed, Model } from "../shared/store.js" */
/** @import { Context } from "../shared/page.js" */

const ALONE = 2; // points from which on there is a picture

/**
 * Draw the comparison of `model` in `el`; returns what takes it away again.
 *
 * @param {Context} context
 */
export const render = (context) =>
  drawn(context, "comparison", [style, found, curve], (root, data, ends) => {
    const choice = new Choice();
    ends.push(follow(choice, context.model, data.trials.length));
    paint(root, data.axes);
    root.append(view(data, choice, context.model));
  });

/**
 * @param {Sent.Comparison} data
 * @param {Choice} choice
 * @param {Model} model
 */
function view(data, choice, model) {
  const mesh = { names: data.axes };
  const points = data.trials.filter((trial) => trial.point).length;
  const search = data.choice ?? null;
  const scatter = points < ALONE ? null : new Scatter(data, choice);
  const table = data.trials.length || !search ? new Table(data, choice) : null;
  const side = table && new Side(data, choice, scatter !== null);
  const pair = new Pair(data, choice);
  const below = h("div", { class: scatter ? "jsm-cmp-below" : "jsm-cmp-only" }, scatter?.element, side?.element);
  const save = scatter && saving(model, () => "comparison");
  const element = h(
    "div",
    { class: "jsm-cmp" },
    h("p", { class: "jsm-lead" }, spans(data.lead, mesh)),
    h("p", { class: "jsm-small jsm-quiet jsm-cmp-about" }, data.about),
    search && runs(search),
    table?.element,
    data.left.length ? left(data.left) : null,
    below,
    save,
    data.curves && curves(data.curves),
    pair.element,
    search && path(search),
    search && others(search, data.axes),
    h(
      "div",
      { class: "jsm-cmp-notes jsm-small jsm-quiet" },
      data.notes.map((note) => h("p", {}, note)),
    ),
  );
  const parts = [table, scatter, side, pair].filter((part) => part !== null);
  const mark = (/** @type {Changed<Chosen>} */ changed) => parts.forEach((part) => part.mark(changed));
  choice.on(mark);
  mark({ chosen: true, other: true, pointed: true });
  followWidth(element, () => {
    scatter?.draw();
    table?.reveal();
  });
  return element;
}

/**
 * The runs of reports over each other.
 *
 * @param {Sent.RunCurves} told
 */
const curves = (told) =>
  h(
    "section",
    { "aria-label": "Curves" },
    h("h3", {}, "Curves"),
    h(
      "p",
      { class: "jsm-small jsm-curve-legend" },
      told.names.map((name, place) => h("span", {}, sample(place), name)),
    ),
    charts(told.charts),
  );

/**
 * Candidates that an interrupt kept from being tried.
 *
 * @param {string[]} lines
 */
const left = (lines) =>
  h("div", { class: "jsm-cmp-left jsm-small" }, h("span", { class: "jsm-quiet" }, "not tried"), lines.map(copyable));

/**
 * Call `fit` when the element has another width, first when it has any.
 *
 * @param {HTMLElement} element
 * @param {() => void} fit
 */
function followWidth(element, fit) {
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (!contentRect.width || contentRect.width === width) return;
    width = contentRect.width;
    fit();
  }).observe(element);
}
