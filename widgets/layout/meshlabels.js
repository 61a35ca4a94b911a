// What stands above and left of a mesh's cells: the name and line of each axis, the indices along it.

import { axisClass, dash, hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";
import { along, LEVEL, named, offset } from "./meshplan.js";
import { labelled } from "./plan.js";

/** @import { Digit } from "./meshplan.js" */
/** @import { MeshPlan } from "./meshplan.js" */
/** @import { Child } from "../shared/dom.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/**
 * A side of the cells; `line`, `name` and `level` are how far the labels stand from the cells.
 *
 * @typedef {object} Side
 * @property {Digit[]} digits
 * @property {number} count
 * @property {number} cell
 * @property {number} gap
 * @property {number} start
 * @property {number} edge
 * @property {boolean} upright
 * @property {number} line
 * @property {number} name
 * @property {number} level
 */
/** @typedef {{ index: number, start: number, stop: number }} Group of cells with the same index */

const DIGIT = 6.2; // px of a digit of an index
const LETTER = 6.6; // px of a letter of a name

/**
 * The labels of all axes of `plan`.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 */
export function meshLabels(mesh, plan) {
  const { x, y, across, down, columns, rows, cw, ch, gap, gutters } = plan;
  const index = gutters[gutters.length - 1];
  const top = {
    digits: across,
    count: columns,
    cell: cw,
    gap,
    start: x,
    edge: y,
    upright: false,
    line: 19,
    name: 26,
    level: 38,
  };
  const away = { line: index + 2, name: index + 8, level: index + 23 };
  const left = { digits: down, count: rows, cell: ch, gap, start: y, edge: x, upright: true, ...away };
  return [...side(mesh, top, plan.numbers), ...side(mesh, left, plan.numbers)];
}

/**
 * The labels of one side.
 *
 * @param {Mesh} mesh
 * @param {Side} at
 * @param {boolean} numbers
 * @returns {Child[]}
 */
function side(mesh, at, numbers) {
  return at.digits.flatMap((digit, i) => {
    const out = at.digits.length - 1 - i;
    const each = at.digits.slice(i + 1).reduce((n, { size }) => n * size, 1);
    const groups = Array.from({ length: at.count / each }, (_, group) => {
      const start = at.start + offset(at.digits, group * each, at.cell, at.gap);
      return {
        index: group % digit.size,
        start,
        stop: start + along(at.digits.slice(i + 1), each, at.cell, at.gap),
      };
    });
    /** @type {Child[]} */
    const labels = out
      ? outer(mesh, at, digit, groups, at.level + (out - 1) * LEVEL)
      : inner(mesh, at, digit, groups, numbers);
    return labels;
  });
}

/**
 * The innermost axis: its name once, the indices of the cells.
 *
 * @param {Mesh} mesh
 * @param {Side} at
 * @param {Digit} digit
 * @param {Group[]} groups
 * @param {boolean} numbers
 */
function inner(mesh, at, digit, groups, numbers) {
  const indices = groups
    .filter(shown(at, digit))
    .map(({ index, start, stop }) => indexed(at, digit, index, (start + stop) / 2));
  if (digit.unit > 1) return indices; // the rest of an axis that is named on the other side
  const stop = groups[groups.length - 1].stop;
  const words = named(mesh, digit, numbers);
  return [label(at, digit, words, (at.start + stop) / 2, at.name), line(at, digit, at.start, stop, at.line), indices];
}

/**
 * Which indices there is room for: every one, every second, ... or none.
 *
 * @param {Side} at
 * @param {Digit} digit
 */
function shown(at, { size, unit }) {
  const each = at.upright ? 11 : String((size - 1) * unit).length * DIGIT + 2;
  const found = new Set(labelled(size, size * at.cell, each));
  const useful = size === 1 || found.size > 2 || size * at.cell >= 2 * each;
  return (/** @type {Group} */ { index }) => useful && found.has(index);
}

/**
 * @param {Side} at
 * @param {Digit} digit
 * @param {number} index
 * @param {number} middle
 */
function indexed(at, { unit }, index, middle) {
  const place = at.upright
    ? { x: at.edge - 5, y: middle + 3.5, "text-anchor": "end" }
    : { x: middle, y: at.edge - 5, "text-anchor": "middle" };
  return s("text", { class: "jsm-mark", ...place }, index * unit);
}

/**
 * An axis around others: a line for each group, with its index where there is room.
 *
 * @param {Mesh} mesh
 * @param {Side} at
 * @param {Digit} digit
 * @param {Group[]} groups
 * @param {number} away
 */
function outer(mesh, at, digit, groups, away) {
  const lines = groups.map(({ start, stop }) => line(at, digit, start, stop, away));
  const words = groups.map(({ index }) => `${named(mesh, digit, true)} ${range(digit, index)}`);
  const room = groups[0].stop - groups[0].start;
  if (words.some((text) => text.length * LETTER > room + at.gap)) {
    const middle = (groups[0].start + groups[groups.length - 1].stop) / 2;
    return [label(at, digit, named(mesh, digit, false), middle, away + 5), lines];
  }
  return [groups.map(({ start, stop }, i) => label(at, digit, words[i], (start + stop) / 2, away + 5)), lines];
}

/**
 * @param {Digit} digit
 * @param {number} index
 */
const range = ({ unit }, index) => (unit > 1 ? `${index * unit}\u2013${(index + 1) * unit - 1}` : index);

/**
 * @param {Side} at
 * @param {Digit} digit
 * @param {string} words
 * @param {number} middle
 * @param {number} away
 */
function label(at, { axis }, words, middle, away) {
  const place = at.upright
    ? { transform: `translate(${at.edge - away} ${middle}) rotate(-90)` }
    : { x: middle, y: at.edge - away };
  return s("text", { class: `jsm-mark jsm-axis ${axisClass(axis)}`, "text-anchor": "middle", ...place }, words);
}

/**
 * @param {Side} at
 * @param {Digit} digit
 * @param {number} start
 * @param {number} stop
 * @param {number} away
 */
function line(at, { axis }, start, stop, away) {
  const d = at.upright ? `M${at.edge - away} ${start}V${stop}` : `M${start} ${at.edge - away}H${stop}`;
  return s("path", {
    d,
    stroke: hue(axis),
    "stroke-dasharray": dash(axis),
    "stroke-width": 1.75,
    fill: "none",
  });
}
