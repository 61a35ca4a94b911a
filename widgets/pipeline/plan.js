// Where the lanes lie: lower as ranks get more, and then without what stands under them.

const [TOP, BOTTOM] = [18, 20]; // px of the axis above the lanes, and of the labels below
const [GAP, HATCHED] = [2, 4]; // px between a lane and its ideal, and between that and the curve
export const WIDE = 700; // px from which there is room for all columns

export const WRITTEN = 10; // px of a lane, or a half of one, in which numbers and edges are drawn

/**
 * px of an action from which a number of so many digits is written on it.
 *
 * @param {number} digits
 */
export const roomOf = (digits) => 3 + 6 * digits;

const FORMS = [
  { ranks: 8, lane: 20, ideal: 7, held: 15, pitch: 62 },
  { ranks: 16, lane: 16, ideal: 5, held: 0, pitch: 29 },
  { ranks: 32, lane: 13, ideal: 0, held: 0, pitch: 16 },
];
const LEAST = { lane: 9, ideal: 0, held: 0, pitch: 11 }; // for more ranks

/** @typedef {ReturnType<typeof planOf>} Plan */

/**
 * The form of `ranks` lanes: what stands where, in px; `holds`: whether a curve tells what each holds.
 *
 * @param {number} ranks
 * @param {boolean} hasIdeal
 */
export function planOf(ranks, hasIdeal, holds = true) {
  const form = FORMS.find((each) => ranks <= each.ranks) ?? LEAST;
  const ideal = hasIdeal ? form.ideal : 0;
  const held = holds ? form.held : 0;
  const less = (form.ideal && !ideal ? form.ideal + GAP : 0) + (form.held && !held ? form.held + HATCHED + GAP : 0);
  const pitch = form.pitch - less;
  return {
    ...form,
    ideal,
    held,
    pitch,
    ranks,
    top: TOP,
    bottom: TOP + pitch * ranks,
    height: TOP + pitch * ranks + BOTTOM,
    y: (/** @type {number} */ rank) => TOP + pitch * rank,
    idealY: (/** @type {number} */ rank) => TOP + pitch * rank + form.lane + GAP,
    base: (/** @type {number} */ rank) =>
      TOP + pitch * rank + form.lane + (ideal ? ideal + GAP : 0) + HATCHED + held + GAP,
    every: Math.ceil(13 / pitch), // one of so many ranks has room for its name
  };
}
