// Round steps between the ticks of an axis.

const ROUND = [1, 2, 5, 10];
const NOISE = 1e-9; // what rounding may add must not take the next step, or a digit more

/**
 * The least of 1, 2 or 5 times a power of ten that is `least` or more, and how many decimals its multiples have. It is
 * never less than `least`, so that labels have room; views/timeline/data.py chooses by the same rule, with the same
 * ticks for the static twin.
 *
 * @param {number} least
 */
export function roundStep(least) {
  const size = 10 ** Math.floor(Math.log10(least));
  const step = size * (ROUND.find((times) => times * size >= least * (1 - NOISE)) ?? 10);
  return { step, decimals: Math.max(0, Math.ceil(-Math.log10(step) - NOISE)) };
}
