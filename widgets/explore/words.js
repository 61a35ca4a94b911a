// What is said of the edits: how many arrays they set, what they cost or save.

import { bytes, count, MINUS } from "../shared/format.js";
import { following } from "./worked.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Trial } from "./trial.js" */
/** @import { Worked } from "./worked.js" */

const NUMBERS = ["no", "one", "two", "three", "four"];

/**
 * `sets 3 leaves: the parameter and its two moments; 4 more lie otherwise because of it`.
 *
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {Worked} work
 */
export const setsText = (data, trial, work) =>
  byHandText(data, trial, work) + (work.moved ? `; ${count(work.moved)} more lie otherwise because of it` : "");

/**
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {Worked} work
 */
function byHandText(data, trial, work) {
  const n = work.changed.length;
  if (!n) return data.step ? "the strategy's own layout, nothing is set by hand" : "nothing is cut yet";
  const byHand = work.changed.filter((i) => data.leaves.path[i] in trial.wishes);
  const [first] = byHand;
  const leaves = `sets ${count(n)} ${n === 1 ? "leaf" : "leaves"}`;
  const more = n - byHand.length;
  if (!more || byHand.length > 1)
    return more ? `${leaves}: ${count(byHand.length)} by hand, ${count(more)} that follow` : leaves;
  if (data.leaves.role[first] !== "params") return `${leaves}: this one and ${count(more)} alike`;
  const moments = `${NUMBERS[more] ?? count(more)} moment${more === 1 ? "" : "s"}`;
  const all = work.changed.filter((i) => i !== first).every((i) => data.leaves.role[i] === "optimizer");
  return `${leaves}: the parameter and its ${all ? (more === 1 ? "moment" : moments) : `${count(more)} followers`}`;
}

/**
 * The array's bytes on a device beside those of the last run: `as now`, `now 36.8 MiB`; without one the whole array.
 *
 * @param {Sent.Explorer} data
 * @param {Worked} work
 * @param {number} leaf
 */
export function nowText(data, work, leaf) {
  if (!data.now) return `of ${bytes(data.leaves.bytes[leaf])}`;
  return work.held[leaf] === data.now[leaf] ? "as now" : `now ${bytes(data.now[leaf])}`;
}

/**
 * `{label, value, note}` of the third figure: the array with what follows it, against the last run or the whole.
 *
 * @param {Sent.Explorer} data
 * @param {Worked} work
 * @param {number} leaf
 */
export function difference(data, work, leaf) {
  const others = following(data.leaves, leaf);
  const all = [leaf, ...others];
  const before = data.now ?? data.leaves.bytes;
  const more = all.reduce((sum, i) => sum + work.held[i] - before[i], 0);
  const moments = others.length && others.every((i) => data.leaves.role[i] === "optimizer");
  const how = moments ? { 1: "its moment", 2: "both moments" }[others.length] : null;
  return {
    label: others.length ? `with ${how ?? `the ${count(others.length)} that follow`}` : "difference",
    value: signed(more),
    note: `per device, ${data.now ? "against this run" : "against a copy on each"}`,
  };
}

/** @param {number} n */
const signed = (n) => (n === 0 ? "\u00b10" : `${n < 0 ? MINUS : "+"}${bytes(Math.abs(n))}`);

/**
 * Of all arrays together: `All 53 arrays: 1.86 GiB on each device, now 1.91 GiB`.
 *
 * @param {Sent.Explorer} data
 * @param {Worked} work
 */
export function totalText(data, work) {
  const n = data.leaves.path.length;
  if (n < 2) return null;
  const before = work.now === null || work.now === work.total ? "" : `, now ${bytes(work.now)}`;
  return `All ${count(n)} arrays: ${bytes(work.total)} on each device${before}`;
}
