// The columns of the table: what each is called, how it is sorted, and what stands in a trial's cell.

import { axisClass, hue } from "../shared/axes.js";
import { h } from "../shared/dom.js";
import { sign } from "../shared/text.js";
import { bar, cell, meshNodes, nameNodes } from "./cells.js";

/** @import { Child } from "../shared/dom.js" */
/** @import * as Sent from "../shared/payload_types.js" */

const WORDS = {
  fits: "Whether every device has room at its peak",
  peak: "Bytes on the fullest device at its peak, computed from the compiled program",
  sent: "What one device sends in a step",
  bubble: "The share of time in which a rank of the pipeline has nothing to do",
  same: "Whether the numbers are those of the plain step, and by how much they differ",
};
const NO_AXES = "Over groups of devices that match no set of mesh axes";
const OTHERS = "Over all other sets of mesh axes";

/**
 * A column of the table.
 *
 * @typedef {object} Column
 * @property {string} key
 * @property {Child} head
 * @property {string} [title]
 * @property {string | null} look its class
 * @property {(trial: Sent.Trial) => string | number | null} order null for what is not known
 * @property {(trial: Sent.Trial) => Child} make the nodes of its cell
 */

/**
 * The columns that have something to tell.
 *
 * @param {Sent.Comparison} data
 * @returns {Column[]}
 */
export function columns(data) {
  const trials = data.trials.filter(({ failed }) => !failed);
  const known = (/** @type {"peak" | "bubble"} */ name) => trials.some((trial) => trial[name] !== null);
  const checked = trials.some(({ same: [, word] }) => word !== "not checked");
  const why = { key: "why", head: "why not", look: null, order: () => null, make: () => null };
  if (!trials.length) return [strategy(data), fits(), why];
  return [
    strategy(data),
    fits(),
    known("peak") && peak(data, trials),
    trials.some(({ seconds, apart }) => seconds !== null || apart) && step(data, trials),
    ...data.sent.names.map((name, i) => sent(data, trials, name, i)),
    known("bubble") && bubble(trials),
    checked && same(),
  ].filter((column) => column !== false);
}

/**
 * Which of them lie under the common head of what is sent.
 *
 * @param {ReturnType<typeof columns>} shown
 */
export const sentColumns = (shown) => shown.filter(({ key }) => key.startsWith("sent"));

/** @param {Sent.Comparison} data */
function strategy({ axes }) {
  const make = (/** @type {Sent.Trial} */ trial) => {
    const name = h("span", { title: trial.label }, nameNodes(trial));
    return [
      h("div", { class: "jsm-cmp-name" }, name, h("span", { class: "jsm-cmp-which" })),
      h("div", { class: "jsm-cmp-mesh" }, meshNodes(trial, axes)),
    ];
  };
  return {
    key: "strategy",
    head: "strategy",
    look: "jsm-cmp-strategy",
    order: (/** @type {Sent.Trial} */ { label }) => label,
    make,
  };
}

function fits() {
  const make = (/** @type {Sent.Trial} */ { fits: [kind, word] }) =>
    kind
      ? [
          sign(kind, null),
          h("span", { class: kind === "error" ? "jsm-error jsm-cmp-wide" : "jsm-cmp-wide" }, ` ${word}`),
        ]
      : h("span", { class: "jsm-quieter" }, word);
  const order = (/** @type {Sent.Trial} */ { fits: [kind] }) => (kind === "ok" ? 0 : kind === "error" ? 2 : 1);
  return { key: "fits", head: "fits", title: WORDS.fits, look: "jsm-cmp-fits", order, make };
}

/**
 * @param {Sent.Comparison} data
 * @param {Sent.Trial[]} trials
 */
function peak({ limit, limit_text: text }, trials) {
  const most = Math.max(limit ?? 0, ...trials.map((trial) => trial.peak ?? 0));
  const more = { limit: limit === null ? null : limit / most };
  const make = (/** @type {Sent.Trial} */ trial) =>
    cell(trial.peak_text, drawn(trial.peak, most, ["var(--jsm-temporaries)"], more));
  const head = ["peak", text ? h("span", { class: "jsm-cmp-wide" }, ` of ${text}`) : null];
  return {
    key: "peak",
    head,
    title: WORDS.peak,
    look: "jsm-cmp-peak jsm-num",
    order: (/** @type {Sent.Trial} */ trial) => trial.peak,
    make,
  };
}

/**
 * @param {number | null} value
 * @param {number} most
 * @param {string[]} fills
 * @param {Parameters<typeof bar>[2]} [more]
 */
const drawn = (value, most, fills, more) => (value === null || !most ? null : bar(value / most, fills, more));

/**
 * @param {Sent.Comparison} data
 * @param {Sent.Trial[]} trials
 */
function step({ source }, trials) {
  const most = Math.max(...trials.map(({ seconds, tail }) => Math.max(seconds ?? 0, tail ?? 0)));
  const make = (/** @type {Sent.Trial} */ { seconds, seconds_text: text, tail, apart }) => {
    const drawing = drawn(seconds, most, ["var(--jsm-ink-2)"], { tick: tail === null ? null : tail / most });
    const told = cell(text, drawing);
    if (apart) told.firstElementChild?.classList.add("jsm-quieter");
    return told;
  };
  const ticked = trials.some(({ tail }) => tail !== null) ? "the tick is the predicted one" : null;
  const title = ["Step time", source, ticked].filter(Boolean).join(", ");
  const head = source === "predicted" ? "predicted step" : "step time";
  return {
    key: "step",
    head,
    title,
    look: "jsm-cmp-step jsm-num",
    order: (/** @type {Sent.Trial} */ trial) => trial.seconds,
    make,
  };
}

/**
 * @param {Sent.Comparison} data
 * @param {Sent.Trial[]} trials
 * @param {string} name
 * @param {number} i
 */
function sent({ axes, sent }, trials, name, i) {
  const over = sent.axes[i];
  const most = Math.max(...trials.flatMap((trial) => trial.sent.map((size) => size ?? 0)));
  const fills = over?.map(hue) ?? ["var(--jsm-ink-3)"];
  const unnamed = name === "?" ? ["other", NO_AXES] : [name, OTHERS];
  const head =
    over?.map((axis, j) => [j ? "+" : null, h("span", { class: axisClass(axis) }, axes[axis])]) ?? unnamed[0];
  const title = over ? `${WORDS.sent} over ${over.map((axis) => axes[axis]).join(" and ")}` : unnamed[1];
  return {
    key: `sent ${name}`,
    head,
    title,
    look: "jsm-cmp-sent jsm-num",
    order: (/** @type {Sent.Trial} */ trial) => trial.sent[i],
    make: (/** @type {Sent.Trial} */ trial) => cell(trial.sent_text[i], drawn(trial.sent[i], most, fills)),
  };
}

/** @param {Sent.Trial[]} trials */
function bubble(trials) {
  const most = Math.max(0.5, ...trials.map((trial) => trial.bubble ?? 0));
  const make = (/** @type {Sent.Trial} */ trial) =>
    cell(trial.bubble_text, drawn(trial.bubble, most, ["var(--jsm-ink-3)"]));
  const order = (/** @type {Sent.Trial} */ trial) => trial.bubble;
  return { key: "bubble", head: "bubble", title: WORDS.bubble, look: "jsm-cmp-bubble jsm-num", order, make };
}

function same() {
  const make = (/** @type {Sent.Trial} */ { same: [kind, word, more] }) => {
    if (!kind) return h("span", { class: "jsm-quieter" }, word);
    const told = h("span", { class: word === "yes" ? "jsm-cmp-wide" : null }, `${word} `);
    return [sign(kind, null), " ", told, h("span", { class: "jsm-quiet" }, more)];
  };
  const head = ["same", h("span", { class: "jsm-cmp-wide" }, " numbers")];
  return {
    key: "same",
    head,
    title: WORDS.same,
    look: "jsm-cmp-same",
    order: (/** @type {Sent.Trial} */ trial) => trial.differs,
    make,
  };
}
