// Which rows the list of leaves shows, as plain data: roles, families of alike leaves folded into one row, leaves.

import { fullest } from "../shared/mesh.js";

export const HEIGHT = { role: 26, leaf: 22, told: 40 }; // px; "told" has a second line
const ROLES = ["params", "frozen", "optimizer", "batch", "rng", "other"];

/** @import * as Sent from "../shared/payload_types.js" */

/**
 * What of a report the list of its leaves reads.
 *
 * @typedef {import("../shared/mesh.js").LeafData & Pick<Sent.Report, "failed" | "noise" | "rows">} LeafList
 */

/**
 * A row. `key` is the same from one list to the next; `leaves` are the leaves that it stands for and `held` what one
 * device holds of them, the one that holds most where they are `uneven`, on parts of the mesh; `open` is null where
 * there is nothing to open; `shared` counts the parts of the path that the row above has too.
 *
 * @typedef {object} Row
 * @property {"role" | "family" | "leaf"} kind
 * @property {string} key
 * @property {string} role
 * @property {string} path
 * @property {number[]} leaves
 * @property {number} held
 * @property {number} level
 * @property {boolean | null} open
 * @property {boolean} told
 * @property {boolean} uneven
 * @property {number} shared
 * @property {number} height
 * @property {number} index
 * @property {number} of
 */

/**
 * The rows in order. `shut` holds keys of roles that are closed, `opened` those of families that are open; `found` is
 * the set of leaves to show, null for all. By size, the largest of a role come first.
 *
 * @param {LeafList} data
 * @param {{ bySize: boolean, shut: Set<string>, opened: Set<string>, found: Set<number> | null }} which
 * @returns {Row[]}
 */
export function listed(data, { bySize, shut, opened, found }) {
  /** @type {Map<string, Row[]>} */
  const groups = new Map(ROLES.map((role) => [role, []]));
  data.rows.forEach(([role, path, leaves], at) => {
    const shown = found === null ? leaves : leaves.filter((leaf) => found.has(leaf));
    const whole = shown.length === leaves.length;
    const kept = groups.get(role) ?? [];
    groups.set(role, kept);
    if (whole && leaves.length > 1) kept.push(family(data, role, path, leaves, at, opened));
    else kept.push(...shown.map((leaf) => single(data, role, leaf, 2)));
  });
  const kept = [...groups].filter(([, rows]) => rows.length);
  return kept.flatMap(([role, rows], i) => {
    if (bySize) rows.sort((a, b) => b.held - a.held);
    const top = header(data, role, rows, !shut.has(`role ${role}`));
    numbered([top], i, kept.length);
    return top.open ? [top, ...opens(data, numbered(rows), bySize)] : [top];
  });
}

/**
 * The leaf to show while none is chosen: of the row that loses most by not being cut, else of the largest.
 *
 * @param {LeafList} data
 */
export function defaultLeaf(data) {
  const best = (/** @type {(row: Sent.Row) => number} */ weight) => {
    const [first, ...others] = data.rows;
    return first ? others.reduce((most, row) => (weight(row) > weight(most) ? row : most), first)[2][0] : null;
  };
  if (Object.keys(data.short).length)
    return best(([, , leaves]) => sum(leaves, (leaf) => data.short[leaf]?.total ?? -1));
  return best(([role, , leaves]) => fullest(data, leaves) + (role === "params" ? 0.5 : 0));
}

/**
 * Bytes that each device keeps more of the row because it is not cut as wanted.
 *
 * @param {LeafList} data
 * @param {Row} row
 */
export const lost = (data, row) => sum(row.leaves, (leaf) => data.short[leaf]?.lost ?? 0);

/** @type {(leaves: number[], of: (leaf: number) => number) => number} */
const sum = (leaves, of) => leaves.reduce((all, leaf) => all + of(leaf), 0);

/**
 * @param {LeafList} data
 * @param {string} role
 * @param {Row[]} rows
 * @param {boolean} open
 */
function header(data, role, rows, open) {
  const leaves = rows.flatMap((row) => row.leaves);
  const uneven = leaves.some((leaf) => data.leaves.within[leaf]);
  const held = fullest(data, leaves);
  return row({ kind: "role", key: `role ${role}`, role, path: role, leaves, held, uneven, level: 1, open });
}

/**
 * @param {LeafList} data
 * @param {string} role
 * @param {string} path
 * @param {number[]} leaves
 * @param {number} at
 * @param {Set<string>} opened
 */
const family = (data, role, path, leaves, at, opened) =>
  row({
    kind: "family",
    key: `family ${at}`,
    role,
    path,
    leaves,
    held: fullest(data, leaves),
    level: 2,
    open: opened.has(`family ${at}`),
    told: role === "params" && leaves[0] in data.short,
  });

/**
 * @param {LeafList} data
 * @param {string} role
 * @param {number} leaf
 * @param {number} level
 */
const single = (data, role, leaf, level) =>
  row({
    kind: "leaf",
    key: `leaf ${leaf}`,
    role,
    path: data.leaves.path[leaf],
    leaves: [leaf],
    held: data.leaves.held[leaf],
    level,
    open: null,
    told: level === 2 && role === "params" && leaf in data.short,
  });

/**
 * A row with what most rows have alike.
 *
 * @param {Pick<Row, "kind" | "key" | "role" | "path" | "leaves" | "held" | "level" | "open"> & Partial<Row>} fields
 * @returns {Row}
 */
const row = ({ told = false, ...fields }) => ({
  told,
  uneven: false,
  shared: 0,
  index: 0,
  of: 1,
  height: fields.kind === "role" ? HEIGHT.role : told ? HEIGHT.told : HEIGHT.leaf,
  ...fields,
});

/** @param {Row[]} rows */
function numbered(rows, from = 0, of = rows.length) {
  rows.forEach((each, i) => Object.assign(each, { index: from + i, of }));
  return rows;
}

/**
 * Open families followed by their members.
 *
 * @param {LeafList} data
 * @param {Row[]} rows
 * @param {boolean} bySize
 */
function opens(data, rows, bySize) {
  const all = rows.flatMap((each) =>
    each.open ? [each, ...numbered(each.leaves.map((leaf) => single(data, each.role, leaf, 3)))] : [each],
  );
  all.forEach((each, i) => {
    each.shared = i && !bySize ? common(all[i - 1].path, each.path) : 0;
  });
  return all;
}

/**
 * @param {string} above
 * @param {string} path
 */
function common(above, path) {
  const [a, b] = [above.split("."), path.split(".")];
  let n = 0;
  while (n < b.length - 1 && a[n] === b[n]) n += 1;
  return n;
}
