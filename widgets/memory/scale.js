// Where bytes lie on a line of pixels, with round binary ticks.

/** @import { Bar } from "./devices.js" */

/** @typedef {ReturnType<typeof scale>} Scale */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const FINEST = 1 / 4; // of a unit, between two ticks

/**
 * Ticks from 0 to `end` bytes, at most `most` of them above 0, a power of two of a unit apart, as [bytes, label];
 * the first label tells the unit.
 *
 * @param {number} end
 */
export function ticks(end, most = 6) {
  const power = Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, end)) / 10)));
  const unit = 1024 ** power;
  const step = Math.max(power ? FINEST : 1, 2 ** Math.ceil(Math.log2(Math.max(1, end) / unit / most)));
  /** @type {[size: number, label: string][]} */
  const found = [[0, `0 ${UNITS[power]}`]];
  for (let at = step; at * unit <= end; at += step) found.push([at * unit, String(at)]);
  return found;
}

const LETTER = 6.05; // px of a figure or letter in the labels, which are monospaced
const [FIGURES, COLUMN] = [72, 68]; // px at the right, for the column of peaks, and of one more
const ROOM = 1.04; // of the largest figure, to the right end

/**
 * A line of `width` px between the labels of `bars` and `columns` of figures, on which `most` bytes have room.
 *
 * @param {number} width
 * @param {Bar[]} bars
 * @param {number} most
 */
export function scale(width, bars, most, columns = 1) {
  const letters = Math.max(...bars.map(({ label, stage }) => label.length + (stage ? stage.length + 1 : 0)));
  const x0 = Math.max(24, Math.ceil(LETTER * letters) + 12);
  const x1 = Math.max(x0 + 1, width - FIGURES - COLUMN * (columns - 1));
  const end = Math.max(1, most) * ROOM;
  const ends = Array.from({ length: columns }, (_, i) => width - COLUMN * (columns - 1 - i)); // of the columns
  return { width, x0, x1, end, ends, x: (/** @type {number} */ size) => x0 + ((x1 - x0) * size) / end };
}
