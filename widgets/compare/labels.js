// Where texts stand beside their points, so that none lies on another, on a point or on a tail.

const [AWAY, LINE] = [9, 13]; // px from a point, and of a line of text

/** @typedef {[left: number, top: number, right: number, bottom: number]} Box */
/** @typedef {[dx: number, dy: number, end: "start" | "middle" | "end"]} Place px away, and its end there */

/**
 * @typedef {object} Text
 * @property {number} x
 * @property {number} y
 * @property {number} width
 * @property {Place[]} places to try, best first
 * @property {boolean} [must] stand, where it covers least
 * @property {number} [more] px farther off
 */

/** @type {Place} */
const ABOVE = [7, -6, "start"];

/** @type {Place[]} */
export const AROUND = [
  [AWAY, 4, "start"],
  ABOVE,
  [7, 16, "start"],
  [-AWAY, 4, "end"],
  [-7, -6, "end"],
  [-7, 16, "end"],
  [0, -10, "middle"],
  [0, 18, "middle"],
];
export const ABOVE_FIRST = [ABOVE, ...AROUND];

/** @type {Place[]} */
export const AT_END = [
  [0, 14, "end"],
  [0, -5, "end"],
];

/**
 * @param {number} x
 * @param {number} y
 * @param {number} width
 * @param {Place[2]} end
 * @returns {Box}
 */
function boxOf(x, y, width, end) {
  const left = { start: x, middle: x - width / 2, end: x - width }[end];
  return [left - 1, y - LINE + 3, left + width + 1, y + 3];
}

/**
 * How many square px two boxes share.
 *
 * @param {Box} a
 * @param {Box} b
 */
const shared = (a, b) =>
  Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));

/**
 * The place that covers least; null of none.
 *
 * @template {{ covers: number }} Covering
 * @param {Covering[]} places
 */
const least = (places) =>
  places.reduce(
    (best, place) => (best && best.covers <= place.covers ? best : place),
    /** @type {Covering | null} */ (null),
  );

/**
 * For each of `texts`, `{x, y, width, places, must, more}`, those that count most first, `{x, y, end}`: null for one
 * that has no room, unless it must stand, which it then does where it covers least. Beside its point it stands `more`
 * px farther off. `taken` has the boxes, `[left, top, right, bottom]`, of what is there already; `bounds` is that of
 * all.
 *
 * @param {Text[]} texts
 * @param {Box[]} taken
 * @param {Box} bounds
 */
export function placed(texts, taken, bounds) {
  const [left, top, right, bottom] = bounds;
  const there = [...taken];
  return texts.map(({ x, y, width, places, must, more = 0 }) => {
    const inside = places
      .map(([dx, dy, end]) => ({ x: x + dx + more * Math.sign(dx), y: y + dy, end }))
      .map((place) => ({ ...place, box: boxOf(place.x, place.y, width, place.end) }))
      .filter(({ box }) => box[0] >= left && box[1] >= top && box[2] <= right && box[3] <= bottom)
      .map((place) => ({ ...place, covers: there.reduce((sum, other) => sum + shared(place.box, other), 0) }));
    const best = inside.find(({ covers }) => covers === 0) ?? (must ? least(inside) : null);
    if (best) there.push(best.box);
    return best;
  });
}
