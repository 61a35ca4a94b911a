// Round times along an axis, in one unit.

import { SPACE } from "../shared/format.js";
import { roundStep } from "../shared/ticks.js";

/** @type {[size: number, name: string][]} */
const UNITS = [
  [1, "s"],
  [1e-3, "ms"],
];

/** @type {[size: number, name: string]} */
const LEAST = [1e-6, "us"];

/**
 * Ticks from `from` to `to`, about `most` of them, as [time, label]; `name` is of the unit, told by the first.
 *
 * @param {number} from
 * @param {number} to
 * @param {number} end of all of the time: it decides the unit
 * @param {number} most
 * @param {string} unit "s", or "" for times in units of their own
 */
export function ticks(from, to, end, most, unit) {
  const [one, name] = unit === "s" ? (UNITS.find(([size]) => end >= 2 * size) ?? LEAST) : [1, ""];
  const { step, decimals } = roundStep((to - from) / one / Math.max(1, most));
  /** @type {[time: number, label: string][]} */
  const found = [];
  for (let k = Math.ceil(from / one / step - 1e-9); k * step * one <= to * (1 + 1e-12); k += 1) {
    const label = k ? (k * step).toFixed(decimals) : "0";
    found.push([k * step * one, found.length || !name ? label : label + SPACE + name]);
  }
  return found;
}
