// Round ticks, in one unit, around values that need not begin at zero.

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].map((name, power) => [1024 ** power, name]);
const SECONDS = [
  [1e-6, "us"],
  [1e-3, "ms"],
  [1, "s"],
];
const ROUND = [1, 2, 5, 10];
const MARGIN = 0.25; // of a step, between a value and the ends

/** The unit in which the largest of `values` is at least one. */
const unitOf = (units, values) => units.findLast(([size]) => Math.max(...values) >= size) ?? units[0];

/**
 * A scale that holds all `values`: `from` and `to` are round, `ticks` are [value, label], at least one and about `most`
 * steps apart, all labels in `unit`.
 */
function scale(values, units, most) {
  const [one, unit] = unitOf(units, values);
  const [low, high] = [Math.min(...values) / one, Math.max(...values) / one];
  const span = high - low || high || 1;
  const least = span / most;
  const size = 10 ** Math.floor(Math.log10(least));
  const step = size * ROUND.find((times) => times * size >= least * (1 - 1e-9));
  const room = MARGIN * step;
  const first = Math.max(0, Math.floor((low - room) / step));
  const last = Math.ceil((high + room) / step);
  const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const steps = Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
  const ticks = steps.map((at) => [at * one, at.toFixed(decimals)]);
  return { unit, ticks, from: ticks[0][0], to: ticks.at(-1)[0] };
}

export const byteScale = (values, most) => scale(values, BYTES, most);
export const secondScale = (values, most) => scale(values, SECONDS, most);
