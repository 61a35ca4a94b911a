// Round ticks, in one unit, around values that need not begin at zero.

import { roundStep } from "../shared/ticks.js";

/** @typedef {[size: number, name: string]} Unit */

/** @type {Unit[]} */
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].map((name, power) => [1024 ** power, name]);

/** @type {Unit[]} */
const SECONDS = [
  [1e-6, "us"],
  [1e-3, "ms"],
  [1, "s"],
];
const MARGIN = 0.25; // of a step, between a value and the ends

/**
 * The unit in which the largest of `values` is at least one.
 *
 * @param {Unit[]} units
 * @param {number[]} values
 */
const unitOf = (units, values) => units.findLast(([size]) => Math.max(...values) >= size) ?? units[0];

/**
 * A scale that holds all `values`: `from` and `to` are round, `ticks` are [value, label], at least one and about `most`
 * steps apart, all labels in `unit`.
 *
 * @param {number[]} values
 * @param {Unit[]} units
 * @param {number} most
 */
function scale(values, units, most) {
  const [one, unit] = unitOf(units, values);
  const [low, high] = [Math.min(...values) / one, Math.max(...values) / one];
  const { step, decimals } = roundStep((high - low || high || 1) / most);
  const room = MARGIN * step;
  const first = Math.max(0, Math.floor((low - room) / step));
  const last = Math.ceil((high + room) / step);
  const steps = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  /** @type {[value: number, label: string][]} */
  const ticks = steps.map((at) => [at * one, at.toFixed(decimals)]);
  return { unit, ticks, from: first * step * one, to: last * step * one };
}

/** @type {(values: number[], most: number) => ReturnType<typeof scale>} */
export const byteScale = (values, most) => scale(values, BYTES, most);

/** @type {(values: number[], most: number) => ReturnType<typeof scale>} */
export const secondScale = (values, most) => scale(values, SECONDS, most);
