// Times, shares and actions in words.

import { rounded, seconds, significant, UNKNOWN } from "../shared/format.js";

/** @type {Record<string, string>} */
export const NAMES = {
  ...{ F: "forward", B: "backward", I: "input gradient", W: "weight gradient" },
  ...{ R: "recomputed", U: "update", O: "other compute", M: "moving data", X: "waiting" },
};

/** @param {string} text */
const without0 = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

/**
 * `35.3 ms`; costs without a unit are told in units: `33 units`.
 *
 * @param {number} value
 * @param {string} unit
 */
export function time(value, unit) {
  if (unit === "s" || value === null) return seconds(value);
  const number = without0(significant(value));
  return `${number} unit${number === "1" ? "" : "s"}`;
}

/**
 * A share to one decimal, so that bubbles compare: `24.4%`.
 *
 * @param {number} share
 */
export const percent = (share) => (share === null || share === undefined ? UNKNOWN : `${rounded(100 * share, 1)}%`);

/**
 * A count that may have halves: `4`, `3.5`.
 *
 * @param {number} value
 */
export const number = (value) => without0(rounded(value, 2));
