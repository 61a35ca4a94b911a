// Round times along an axis, in one unit.

const UNITS = [
  [1, "s"],
  [1e-3, "ms"],
  [1e-6, "us"],
];

/** Ticks from `from` to `to`, about `most` of them, as [time, label]; `name` is of the unit, told by the first. */
export function ticks(from, to, end, most, unit) {
  const [one, name] = unit === "s" ? (UNITS.find(([size]) => end >= 2 * size) ?? UNITS[2]) : [1, ""];
  const least = (to - from) / one / Math.max(1, most);
  const size = 10 ** Math.floor(Math.log10(least));
  const step = size * [1, 2, 5, 10].find((times) => times * size >= least * (1 - 1e-9));
  const decimals = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
  const found = [];
  for (let k = Math.ceil(from / one / step - 1e-9); k * step * one <= to * (1 + 1e-12); k += 1) {
    const label = k ? (k * step).toFixed(decimals) : "0";
    found.push([k * step * one, found.length || !name ? label : `${label}\u202f${name}`]);
  }
  return found;
}
