// Numbers as they are written everywhere in a report, rounded half up: the same as units.py of the package, and held
// to the same table of cases.

export const SPACE = "\u202f";
export const UNKNOWN = "\u2013";
export const MINUS = "\u2212";
const BYTE_UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const SECOND_UNITS = ["us", "ms", "s"];
const NEXT_UNIT = 999.5;
const LEAST_TIME = 5e-10; // s, what rounds to no time

/** @typedef {number | null | undefined} Figure a number, or what stands for one that is not known */

/**
 * @param {Figure} value
 * @returns {value is number}
 */
const known = (value) => value !== null && value !== undefined;

/**
 * `value` with so many decimals, half up on the exact value.
 *
 * @param {number} value
 * @param {number} decimals
 */
export function rounded(value, decimals) {
  const text = Math.abs(value).toFixed(decimals);
  return value < 0 && Number(text) !== 0 ? MINUS + text : text;
}

/**
 * `value` with so many significant digits; digits before the point are never dropped.
 *
 * @param {number} value
 */
export function significant(value, digits = 3) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1 - 0.5 * 10 ** -digits && digits > 2) return rounded(value, digits);
  let decimals = digits - 1;
  while (decimals > 0 && size >= 10 ** (digits - decimals) - 0.5 * 10 ** -decimals) decimals -= 1;
  return rounded(value, decimals);
}

/**
 * @param {number} value
 * @param {string[]} units
 * @param {number} step
 * @returns {[number: string, unit: string]}
 */
function withUnit(value, units, step) {
  let left = value;
  for (const unit of units.slice(0, -1)) {
    if (Math.abs(left) < NEXT_UNIT) return [significant(left), unit];
    left /= step;
  }
  return [significant(left), units[units.length - 1]];
}

/**
 * The number and the unit of `n` bytes: `["4.63", "GiB"]`; unknown (null) has no unit.
 *
 * @param {Figure} n
 * @returns {[number: string, unit: string]}
 */
export function bytesParts(n) {
  if (!known(n)) return [UNKNOWN, ""];
  if (Math.abs(n) < NEXT_UNIT) return [rounded(n, 0), "B"];
  return withUnit(n / 1024, BYTE_UNITS.slice(1), 1024);
}

/** @param {[number: string, unit: string]} parts */
const joined = ([number, unit]) => (unit ? number + SPACE + unit : number);

/**
 * `n` bytes in B, KiB, MiB, GiB, ...: `4.63 GiB`.
 *
 * @param {Figure} n
 */
export const bytes = (n) => joined(bytesParts(n));

/**
 * Seconds in us, ms or s: `47.3 ms`, `<0.001 us`.
 *
 * @param {Figure} t
 */
export function seconds(t) {
  if (!known(t)) return UNKNOWN;
  if (t > 0 && t < LEAST_TIME) return joined(["<0.001", "us"]);
  return joined(withUnit(t * 1e6, SECOND_UNITS, 1000));
}

/**
 * A share of a whole: whole percents from 10%, one decimal below, `<0.1%` below that.
 *
 * @param {Figure} fraction
 */
export function share(fraction) {
  if (!known(fraction)) return UNKNOWN;
  const percent = 100 * fraction;
  if (percent > 0 && percent < 0.1) return "<0.1%";
  return `${rounded(percent, percent >= 9.95 || percent === 0 ? 0 : 1)}%`;
}

/**
 * A count of things: `2,064`.
 *
 * @param {Figure} n
 */
export const count = (n) =>
  known(n) ? (n < 0 ? MINUS : "") + String(Math.abs(n)).replace(/\B(?=(\d{3})+$)/g, ",") : UNKNOWN;

/**
 * `1 leaf`, `2,064 leaves`.
 *
 * @param {number} n
 * @param {string} one
 */
export const counted = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
