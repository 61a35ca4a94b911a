// Everything that follows from what is tried, worked out from shapes: layouts, bytes, the line.

import { leafAt, Mesh } from "../shared/mesh.js";
import { copies, fitting, held, same } from "./cuts.js";
import { lineText, meshText, pattern } from "./line.js";

const OWN = "set by hand";
const FOLLOWS = "follows one that is set by hand";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { LeafData } from "../shared/mesh.js" */
/** @import { Trial } from "./trial.js" */
/** @typedef {ReturnType<typeof worked>} Worked */
/** @typedef {Map<string, number>} Sizes sizes of mesh axes, by name */

/**
 * The arrays that lie as the one at `index` wherever it is put.
 *
 * @param {Pick<Sent.ExploredLeaves, "classes">} leaves
 * @param {number} index
 */
export function following({ classes }, index) {
  const own = new Set(classes[index]);
  return classes.flatMap((each, i) => (i !== index && each.length && each.every((c) => own.has(c)) ? [i] : []));
}

/**
 * `wishes` with the cut of one array, without those of arrays that share a dimension with it; null leaves it out.
 *
 * @param {Sent.ExploredLeaves} leaves
 * @param {Record<string, Sent.Cut>} wishes
 * @param {number} index
 * @param {Sent.Cut | null} cut
 */
export function wished({ path, classes }, wishes, index, cut) {
  const own = new Set(classes[index]);
  const kept = Object.entries(wishes).filter(([name]) => {
    const i = path.indexOf(name);
    return i !== index && i >= 0 && !classes[i].some((c) => own.has(c));
  });
  return Object.fromEntries(cut === null ? kept : [...kept, [path[index], cut]]);
}

/**
 * What `trial` gives of the arrays in `data`: `own` and `cuts`, the strategy's layout and the one with what was set by
 * hand; `changed`, those that this sets, and how many others it has `moved`; `view`, data as the drawings of a report
 * take it, with its `mesh`; `total`, `now`, `line`, `cell`.
 *
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 */
export function worked(data, trial) {
  const { path, shape, bits, classes } = data.leaves;
  const { sizes, laid } = trial;
  const all = path.map((_, i) => i);
  const own = all.map((i) => fitting(laid.cuts[i], shape[i], sizes));
  const { cuts, isSet } = edited(data.leaves, settled(trial) ?? own, trial.wishes, sizes);
  const otherwise = all.filter((i) => !same(own[i], cuts[i]));
  const changed = otherwise.filter(isSet);
  const each = all.map((i) => held(shape[i], bits[i], cuts[i], sizes));
  const view = drawable(data, trial, cuts, each, new Set(changed));
  const line = lineOf(data, trial, own, cuts);
  return {
    own,
    cuts,
    changed,
    moved: otherwise.length - changed.length,
    held: each,
    view,
    mesh: new Mesh(view.mesh),
    total: each.reduce((sum, n) => sum + n, 0),
    now: data.now?.reduce((sum, n) => sum + n, 0) ?? null,
    copies: (/** @type {number} */ i) => copies(cuts[i], sizes),
    line,
    cell: data.cell === null ? null : `${line}\n${data.cell}`,
    leaf: (/** @type {number} */ i) => leafAt(view, i),
    classes,
  };
}

/**
 * The layout as Python planned it with just what is set by hand; null where it did not, or not yet.
 *
 * @param {Trial} trial
 */
function settled({ axes, strategy, wishes, laid }) {
  if (!laid.settled || String(laid.mesh) !== String(axes) || laid.strategy !== strategy) return null;
  return JSON.stringify(laid.settled.wishes) === JSON.stringify(wishes) ? laid.settled.cuts : null;
}

/**
 * `base` with what is set by hand and what follows it; `isSet(i)` says which these are.
 *
 * @param {Sent.ExploredLeaves} leaves
 * @param {Sent.Cut[]} base
 * @param {Record<string, Sent.Cut>} wishes
 * @param {Sizes} sizes
 */
function edited({ path, shape, classes }, base, wishes, sizes) {
  const cuts = [...base];
  /** @type {Map<number, string[]>} */
  const fixed = new Map();
  const byHand = new Set();
  for (const [name, wish] of Object.entries(wishes)) {
    const i = path.indexOf(name);
    if (i < 0) continue;
    byHand.add(i);
    cuts[i] = fitting(wish, shape[i], sizes);
    classes[i].forEach((c, dim) => fixed.set(c, cuts[i][dim]));
  }
  const follows = (/** @type {number} */ i) => !byHand.has(i) && classes[i].some((c) => fixed.has(c));
  const all = cuts.map((cut, i) => {
    if (!follows(i)) return cut;
    const wish = classes[i].map((c, dim) => fixed.get(c) ?? cut[dim]);
    return fitting(wish, shape[i], sizes);
  });
  return { cuts: all, isSet: (/** @type {number} */ i) => byHand.has(i) || follows(i) };
}

/**
 * Data as the drawings of a report take it.
 *
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {Sent.Cut[]} cuts
 * @param {number[]} each
 * @param {Set<number>} changed
 * @returns {LeafData & Pick<Sent.Report, "failed" | "noise" | "rows">}
 */
function drawable(data, { axes, laid, wishes }, cuts, each, changed) {
  const index = new Map(axes.map(([name], i) => [name, i]));
  const whys = [...laid.whys, OWN, FOLLOWS];
  const edited = (/** @type {number} */ i) => whys.length - (data.leaves.path[i] in wishes ? 2 : 1);
  const why = laid.why.map((w, i) => (changed.has(i) ? edited(i) : w));
  const within = cuts.map(() => 0);
  const spec = cuts.map((cut) => cut.map((names) => names.map((name) => /** @type {number} */ (index.get(name)))));
  return {
    mesh: { axes, devices: String(laid.mesh) === String(axes) ? (laid.devices ?? []) : [], hosts: [], text: "" },
    leaves: { ...data.leaves, spec, held: each, why, within },
    whys,
    withins: [[]],
    short: {},
    failed: [],
    noise: [],
    rows: data.rows,
  };
}

/**
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {Sent.Cut[]} own
 * @param {Sent.Cut[]} cuts
 */
function lineOf(data, { axes, strategy, wishes, laid }, own, cuts) {
  const { path } = data.leaves;
  /** @type {[what: string, cut: Sent.Cut][][]} */
  const [rules, specs] = [[], []];
  for (const name of Object.keys(wishes)) {
    const i = path.indexOf(name);
    if (i < 0 || same(own[i], cuts[i])) continue;
    const alike = following(data.leaves, i).filter((j) => same(cuts[j], cuts[i]));
    if (laid.given.includes(i)) specs.push([name, cuts[i]]);
    else rules.push([pattern(name, path, new Set(alike.map((j) => path[j]))), cuts[i]]);
  }
  return lineText(data.line, strategy, meshText(axes, laid.made_of), rules, specs);
}
