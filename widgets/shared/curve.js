// A number over the steps of a run: the mean of each bucket as a line, around it least and most; runs over each other
// have dashes of their own. Python draws the same, views/training/chart.py.

import { h, s } from "./dom.js";
import { bytes, count, SPACE, seconds, share, significant } from "./format.js";

const [WIDTH, HEIGHT, TOP, BOTTOM] = [276, 108, 14, 16];
const LOG = 50; // so many times the least is the largest value of a scale that counts its digits
const DASHES = ["", "5 3", "2 2", "8 3 2 3"];
const PREFIXES = ["", "k", "M", "G", "T", "P", "E"];

/** @import * as Sent from "./payload_types.js" */
/** @typedef {Sent.Curve & Pick<Sent.Chart, "label" | "unit">} Curve */
/** @typedef {[step: number, least: number, mean: number, most: number]} Point a bucket with finite values */
/** @typedef {{ low: number, high: number, log: boolean }} Scale */

/**
 * A chart of curves of one number, with what stands above it, `value` in words.
 *
 * @param {Curve[]} curves
 */
export function chart(curves, value = "") {
  const [first] = curves;
  const points = curves.flatMap(({ buckets }) => parts(buckets).flat());
  const head = h("div", { class: "jsm-small" }, h("b", {}, first.label), value && ` ${value}`);
  if (!points.length) return h("figure", { class: "jsm-curve" }, head);
  const scale = scaleOf(points, first.unit !== null);
  const last = Math.max(...curves.map(({ buckets }) => buckets[buckets.length - 1][0]));
  const svg = s(
    "svg",
    {
      width: WIDTH,
      height: HEIGHT,
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      role: "img",
      "aria-label": `${first.label} ${value}, ${count(last)} steps`,
    },
    axes(first, scale, last),
    curves.map((curve, place) => drawn(curve, scale, last, DASHES[place % DASHES.length])),
  );
  return h("figure", { class: "jsm-curve" }, head, svg);
}

/**
 * The charts of several numbers, each of runs over each other.
 *
 * @param {Sent.Chart[]} told
 */
export const charts = (told) =>
  h(
    "div",
    { class: "jsm-curves" },
    told.map(({ curves, value, ...about }) =>
      chart(
        curves.map((curve) => ({ ...about, ...curve })),
        value,
      ),
    ),
  );

/**
 * A short line with the dash of a run, for a legend.
 *
 * @param {number} place
 */
export const sample = (place) =>
  s(
    "svg",
    { width: 24, height: 8, "aria-hidden": "true" },
    s("path", { d: "M0 4H24", class: "jsm-curve-mean", "stroke-dasharray": DASHES[place % DASHES.length] || null }),
  );

/**
 * @param {Point[]} points
 * @param {boolean} quantity
 * @returns {Scale}
 */
function scaleOf(points, quantity) {
  const low = Math.min(...points.map(([, least]) => least));
  const high = Math.max(...points.map(([, , , most]) => most));
  if (quantity) return { low: Math.min(0, low), high, log: false };
  return { low, high, log: low > 0 && high >= LOG * low };
}

/**
 * @param {Scale} scale
 * @param {number} value
 */
function shareOf({ low, high, log }, value) {
  if (high <= low) return 0.5;
  if (log) return Math.log(value / low) / Math.log(high / low);
  return (value - low) / (high - low);
}

/**
 * @param {Curve} curve
 * @param {Scale} scale
 * @param {number} last
 */
function axes(curve, scale, last) {
  const floor = HEIGHT - BOTTOM;
  /** @type {(x: number, y: number, said: string, anchor?: string) => SVGElement} */
  const text = (x, y, said, anchor) => s("text", { x, y, class: "jsm-mark", "text-anchor": anchor }, said);
  return [
    [TOP, floor].map((y) => s("path", { class: "jsm-hair", d: `M0 ${y + 0.5}H${WIDTH}` })),
    text(0, TOP - 4, valueText(scale.high, curve.unit) + (scale.log ? ", log scale" : "")),
    text(0, HEIGHT - 4, valueText(scale.low, curve.unit)),
    text(WIDTH, HEIGHT - 4, `step ${count(last)}`, "end"),
  ];
}

/**
 * @param {Curve} curve
 * @param {Scale} scale
 * @param {number} last
 * @param {string} dash
 */
function drawn({ buckets, astray }, scale, last, dash) {
  const x = (/** @type {number} */ step) => (1 + (last > 1 ? (step - 1) / (last - 1) : 0.5) * (WIDTH - 2)).toFixed(1);
  const at = (/** @type {number} */ step, /** @type {number} */ value) =>
    `${x(step)} ${(TOP + 2 + (1 - shareOf(scale, value)) * (HEIGHT - BOTTOM - TOP - 4)).toFixed(1)}`;
  const marks = parts(buckets).flatMap((part) => {
    const above = part.map(([step, , , most]) => at(step, most));
    const below = part.map(([step, least]) => at(step, least)).reverse();
    const line = part.map(([step, , mean]) => at(step, mean)).join("L");
    return [
      s("path", { class: "jsm-curve-band", d: `M${[...above, ...below].join("L")}Z` }),
      s("path", {
        class: "jsm-curve-mean",
        d: `M${line}${part.length === 1 ? "h.01" : ""}`,
        "stroke-dasharray": dash || null,
      }),
    ];
  });
  if (astray)
    marks.push(
      s(
        "path",
        { class: "jsm-curve-astray", d: `M${x(astray)} ${TOP}V${HEIGHT - BOTTOM}` },
        s("title", {}, `not finite from step ${astray} on`),
      ),
    );
  return marks;
}

/**
 * The buckets with finite values, cut where one has none.
 *
 * @param {Sent.Bucket[]} buckets
 */
function parts(buckets) {
  const found = [/** @type {Point[]} */ ([])];
  for (const bucket of buckets) {
    if (bucket[1] === null) found.push([]);
    else found[found.length - 1].push(/** @type {Point} */ (bucket));
  }
  return found.filter((part) => part.length);
}

/**
 * A value with its unit, as views/training/data.py has it.
 *
 * @param {number} value
 * @param {string | null} unit
 */
function valueText(value, unit) {
  if (unit === "s") return seconds(value);
  if (unit === "bytes") return bytes(value);
  if (unit === "share") return share(value);
  if (unit === "FLOP/s") {
    const power = Math.min(PREFIXES.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
    return `${significant(value / 1000 ** power)}${SPACE}${PREFIXES[power]}FLOP/s`;
  }
  if (unit !== null) return `${value >= 100 ? count(Math.round(value)) : significant(value)}${SPACE}/s`;
  return String(Number(value.toPrecision(4))).replace("-", "\u2212");
}
