// A figure with a bar under it, and the marks of a trial's name.

import { axisClass } from "../shared/axes.js";
import { h, s } from "../shared/dom.js";
import { SPACE, UNKNOWN } from "../shared/format.js";
import { least } from "../shared/kinds.js";

/** @import * as Sent from "../shared/payload_types.js" */

const HEIGHT = 5; // px of a bar
const TICK = [1.5, HEIGHT + 4]; // px

/**
 * `47.3 ms` with its unit in quieter ink.
 *
 * @param {string} text
 */
export function figure(text) {
  const [number, unit] = text.split(SPACE);
  return unit ? [number, h("span", { class: "jsm-u" }, unit)] : [number];
}

/**
 * A figure and its bar; a dash for what is not known. One that is not `exact` is the least that it may be.
 *
 * @param {string} text
 * @param {SVGElement | null} [drawing]
 */
export function cell(text, drawing = null, exact = true) {
  const look = text === UNKNOWN ? "jsm-cell-figure jsm-quieter" : "jsm-cell-figure";
  const told = h("div", { class: look }, least(figure(text), exact));
  return h("div", { class: "jsm-cell" }, told, drawing ?? s("svg", { "aria-hidden": "true" }));
}

/** @param {number} share */
const percent = (share) => `${100 * Math.max(0, Math.min(1, share))}%`;

/**
 * A bar of `share` of the cell in bands of `fills`; what lies beyond `limit`, a share as well, in the colour of errors.
 * A tick stands at `tick`.
 *
 * @param {number} share
 * @param {string[]} fills
 * @param {{ tick?: number | null, limit?: number | null }} [more]
 */
export function bar(share, fills, { tick = null, limit = null } = {}) {
  const band = HEIGHT / fills.length;
  const over = limit !== null && share > limit ? limit : null;
  const standing = over ?? tick;
  return s(
    "svg",
    { "aria-hidden": "true" },
    s("rect", { width: "100%", height: HEIGHT, class: "jsm-cell-room" }),
    fills.map((fill, i) => s("rect", { width: percent(over ?? share), y: i * band, height: band, fill })),
    over !== null &&
      s("rect", { x: percent(over), width: percent(share - over), height: HEIGHT, class: "jsm-cell-over" }),
    standing === null ? null : mark(standing),
  );
}

/** @param {number} share */
function mark(share) {
  const [width, height] = TICK;
  const x = `calc(${percent(share)} - ${width / 2}px)`;
  return s("rect", { style: { x }, y: -2, width, height, class: "jsm-cell-tick" });
}

/**
 * The letter that a trial has in a pair.
 *
 * @param {string} which
 */
export const letter = (which) => h("span", { class: "jsm-cmp-letter" }, which);

/**
 * `data=4 model=2`, each axis in its hue.
 *
 * @param {Pick<Sent.Trial, "mesh">} trial
 * @param {string[]} names
 */
export const meshNodes = ({ mesh }, names) =>
  mesh.map(([axis, size], i) => [i ? " " : null, h("span", { class: axisClass(axis) }, names[axis]), `=${size}`]);

/**
 * What a trial is called: its strategy in bold, its options after it.
 *
 * @param {Pick<Sent.Trial, "name" | "more">} trial
 */
export const nameNodes = ({ name, more }) => [h("b", {}, name), more ? ` ${more}` : null];
