// How a collective is drawn and named: its axes in their hues, its kind by how full the hue is.

import { axisClass, hue } from "./axes.js";
import { h, s } from "./dom.js";
import { count } from "./format.js";

/** @import { Child } from "./dom.js" */
/** @import { AxisNames } from "./mesh.js" */

/** @type {Record<string, string>} */
export const SHORT = {
  "all-gather": "AG",
  "all-reduce": "AR",
  "reduce-scatter": "RS",
  "all-to-all": "A2A",
  "collective-permute": "CP",
};

/** @type {Record<string, number>} */
const OPACITY = {
  "all-gather": 1,
  "all-reduce": 0.8,
  "reduce-scatter": 0.6,
  "all-to-all": 0.4,
  "collective-permute": 0.3,
};
const OTHER = 0.2; // of kinds that are seldom seen
const LEAST = 0.75; // px
export const SEAM = 0.75; // px

/**
 * A piece of a bar from `from`, `size` long, in percent: as many bands as axes. The line under it in the full hue is
 * seen however pale the kind is.
 *
 * @param {string} kind
 * @param {number[] | null} axes
 * @param {number} from
 * @param {number} size
 * @param {number} height
 */
export function piece(kind, axes, from, size, height) {
  const hues = axes === null ? ["var(--jsm-ink-3)"] : axes.map(hue);
  const band = height / hues.length;
  const across = { x: `${from}%`, style: { width: `max(${LEAST}px, ${size}%)` } };
  return hues.map((fill, i) => [
    s("rect", { ...across, y: i * band, height: band, fill, opacity: OPACITY[kind] ?? OTHER }),
    s("rect", { ...across, y: (i + 1) * band - 1, height: 1, fill }),
  ]);
}

/**
 * Pieces side by side, `{kind, axes, size}` in percent, a seam before each but the first.
 *
 * @param {{ kind: string, axes: number[] | null, size: number }[]} parts
 * @param {number} height
 */
export function pieces(parts, height) {
  let at = 0;
  return parts.map(({ kind, axes, size }) => {
    const from = at;
    at += size;
    const seam = from > 0 && s("rect", { x: `${from}%`, width: SEAM, height, fill: "var(--jsm-bg)" });
    return [piece(kind, axes, from, size, height), seam];
  });
}

const NO_AXES = "Its groups of devices match no set of mesh axes";

/**
 * `data model`, each in its hue, or `groups of 4` of those that match no axes.
 *
 * @param {number[] | null} axes
 * @param {number | null} size
 * @param {AxisNames} mesh
 */
export function over(axes, size, mesh) {
  if (axes === null) return h("span", { title: NO_AXES }, overText(axes, size, mesh));
  return axes.map((axis, i) => [i ? " " : null, h("span", { class: axisClass(axis) }, mesh.names[axis])]);
}

/**
 * The same as plain text.
 *
 * @param {number[] | null} axes
 * @param {number | null} size
 * @param {AxisNames} mesh
 */
export function overText(axes, size, mesh) {
  if (axes === null) return size === null ? "other groups" : `groups of ${count(size)}`;
  return axes.map((axis) => mesh.names[axis]).join(" and ");
}

const LOWER = "\u2265";
export const AT_LEAST = "The program decides while it runs how often: at least so much";

/**
 * `text`, marked as the least that it may be where it is not exact.
 *
 * @param {Child} text
 * @param {boolean} exact
 */
export const least = (text, exact) => (exact ? text : [h("span", { title: AT_LEAST }, LOWER), text]);

/**
 * The head of a column of numbers; `title` explains it.
 *
 * @param {Child} text
 * @param {string} [title]
 */
export const number = (text, title) => h("th", { scope: "col", class: "jsm-num", title }, text);
