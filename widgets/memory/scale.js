// A scale of bytes with round binary ticks.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const STEPS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/** Ticks from 0 to `end` bytes, at most `most` of them above 0, as [bytes, label]; the first label tells the unit. */
export function ticks(end, most = 6) {
  const power = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(1, end)) / 10)));
  const unit = 1024 ** power;
  const step = STEPS.find((each) => end / unit / each <= most) ?? STEPS.at(-1);
  // A unit's few first steps are too coarse for what ends just above it.
  const fine = step === 1 && end / unit < 3 && power > 0 ? 0.5 : step;
  const found = [];
  for (let at = 0; at * unit <= end; at += fine) found.push([at * unit, at ? String(at) : `0 ${UNITS[power]}`]);
  return found;
}
