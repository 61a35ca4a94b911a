// Edits of a mesh's axes, as plain data: `[[name, size], ...]` in, the same out.

import { count } from "./trial.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Axes } from "./trial.js" */

const MOST = 4096; // devices that are drawn
const NAMES = ["data", "model", "seq", "expert", "fsdp", "replica"];

/** @type {(axes: Axes, i: number, size: number) => Axes} */
const put = (axes, i, size) => axes.map(([name, old], at) => [name, at === i ? size : old]);

/**
 * @param {Axes} axes
 * @param {number} i
 * @param {(size: number) => boolean} holds
 */
const other = (axes, i, holds) => axes.findIndex(([, size], at) => at !== i && holds(size));

/** @param {number} size */
const even = (size) => size % 2 === 0;

/**
 * One axis with another size; the others stay.
 *
 * @param {Axes} axes
 * @param {number} i
 * @param {number} size
 */
export function resized(axes, i, size) {
  const to = put(axes, i, size);
  return size >= 1 && count(to) <= MOST ? to : axes;
}

/**
 * An axis doubled or halved. Where all of the `there` devices are in use (null: nobody knows how many there are),
 * another axis gives or takes the factor, if it can: they stay in use.
 *
 * @param {Axes} axes
 * @param {number} i
 * @param {boolean} up
 * @param {number | null} there
 */
export function scaled(axes, i, up, there) {
  const size = axes[i][1];
  if (!up && size === 1) return axes;
  const to = put(axes, i, up ? 2 * size : Math.floor(size / 2));
  const full = count(axes) === there && (up || even(size));
  const giver = full ? other(axes, i, up ? even : () => true) : -1;
  if (giver >= 0) return put(to, giver, up ? to[giver][1] / 2 : to[giver][1] * 2);
  return count(to) <= MOST ? to : axes;
}

/**
 * One more axis, of 2 devices, which the last axis that can gives where all are in use.
 *
 * @param {Axes} axes
 * @param {number | null} there
 * @returns {Axes}
 */
export function extended(axes, there) {
  const taken = new Set(axes.map(([name]) => name));
  const name = NAMES.find((each) => !taken.has(each)) ?? `axis${axes.length}`;
  const giver = there !== null && 2 * count(axes) > there ? axes.findLastIndex(([, size]) => even(size)) : -1;
  const rest = giver < 0 ? axes : put(axes, giver, axes[giver][1] / 2);
  return [...rest, [name, count(rest) * 2 <= MOST ? 2 : 1]];
}

/**
 * Without one axis; the first of the others takes its devices.
 *
 * @param {Axes} axes
 * @param {number} i
 */
export function reduced(axes, i) {
  const size = axes[i][1];
  const rest = axes.filter((_, at) => at !== i);
  return put(rest, 0, rest[0][1] * size);
}

/**
 * `wishes` with an axis by its new name.
 *
 * @param {Record<string, Sent.Cut>} wishes
 * @param {string} from
 * @param {string} to
 */
export const renamed = (wishes, from, to) =>
  Object.fromEntries(
    Object.entries(wishes).map(([path, cut]) => [path, cut.map((axes) => axes.map((a) => (a === from ? to : a)))]),
  );
