// A mesh axis is told by its hue and, for those who don't see hues, by its dash pattern. Both are its job's, as its
// name tells that, so that it looks the same in every view; views/colours.py decides just so, by the same cases.

const JOBS = [
  ["data", "dp", "batch", "replica"],
  ["model", "tp", "tensor"],
  ["fsdp"],
  ["pipe", "pp", "stage", "pipeline"],
  ["seq", "sp", "sequence", "context", "cp"],
  ["expert", "ep"],
];
const HUES = 8;
const FREE = [6, 7, 5, 4, 3, 2, 1, 0]; // what further axes take, those of no job first
const DASHES = ["none", "5 2", "2 2", "6 2 2 2", "9 3", "1 2", "6 2 2 2 2 2", "10 2 4 2"];

/**
 * A number for each of `names`, axes of one mesh or of one view: the first of a job has its hue, others take what is
 * left, in order. `number % HUES` is the hue; from `HUES` on it comes with another dash pattern.
 *
 * @param {string[]} names
 */
export function hues(names) {
  /** @type {(number | null)[]} */
  const found = names.map(() => null);
  names.forEach((name, i) => {
    const job = JOBS.findIndex((known) => known.includes(name.toLowerCase()));
    if (job >= 0 && !found.includes(job)) found[i] = job;
  });
  const left = FREE.filter((number) => !found.includes(number));
  let next = HUES;
  return found.map((number) => number ?? left.shift() ?? next++);
}

/**
 * Say in `root` what hue and dash pattern the axes of these names have there: `hue(i)` and the rest are of the i-th.
 *
 * @param {HTMLElement | SVGElement} root
 * @param {string[]} names
 */
export function paint(root, names) {
  hues(names).forEach((number, i) => {
    root.style.setProperty(`--jsm-x${i}`, `var(--jsm-a${number % HUES})`);
    root.style.setProperty(`--jsm-d${i}`, DASHES[(number + Math.floor(number / HUES)) % HUES]);
  });
}

/** @param {number} axis */
export const hue = (axis) => `var(--jsm-x${axis})`;

/** @param {number} axis */
export const dash = (axis) => `var(--jsm-d${axis})`;

/**
 * The ink of text; base.css has a class for as many axes as a view may have.
 *
 * @param {number} axis
 */
export const axisClass = (axis) => `jsm-ax jsm-ax${axis}`;
