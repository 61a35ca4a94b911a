// Which rows the list of leaves shows, as plain data: roles, families of alike leaves folded into one row, leaves.

export const HEIGHT = { role: 26, leaf: 22, told: 40 }; // px; "told" has a second line
const ROLES = ["params", "optimizer", "batch", "rng", "other"];

/**
 * A row. `key` is the same from one list to the next; `leaves` are the leaves that it stands for and `held` what one
 * device holds of them; `open` is null where there is nothing to open.
 *
 * @typedef {{kind: "role"|"family"|"leaf", key: string, role: string, path: string, leaves: number[], held: number,
 *   level: number, open: boolean|null, shared: number, height: number, index: number, of: number}} Row
 */

/**
 * The rows in order. `shut` holds keys of roles that are closed, `opened` those of families that are open; `found` is
 * the set of leaves to show, null for all. By size, the largest of a role come first.
 *
 * @returns {Row[]}
 */
export function listed(data, { bySize, shut, opened, found }) {
  const groups = new Map(ROLES.map((role) => [role, []]));
  data.rows.forEach(([role, path, leaves], at) => {
    const shown = found === null ? leaves : leaves.filter((leaf) => found.has(leaf));
    const whole = shown.length === leaves.length;
    if (!groups.has(role)) groups.set(role, []);
    const kept = groups.get(role);
    if (whole && leaves.length > 1) kept.push(family(data, role, path, leaves, at, opened));
    else kept.push(...shown.map((leaf) => single(data, role, leaf, 2)));
  });
  const kept = [...groups].filter(([, rows]) => rows.length);
  return kept.flatMap(([role, rows], i) => {
    if (bySize) rows.sort((a, b) => b.held - a.held);
    const top = header(role, rows, !shut.has(`role ${role}`));
    numbered([top], i, kept.length);
    return top.open ? [top, ...opens(data, numbered(rows), bySize)] : [top];
  });
}

/** The leaf to show while none is chosen: the one that loses most by not being cut, else the largest. */
export function defaultLeaf(data) {
  const short = Object.entries(data.short).sort(([, a], [, b]) => b.total - a.total);
  if (short.length) return Number(short[0][0]);
  const { held, role } = data.leaves;
  const weight = (leaf) => held[leaf] + (role[leaf] === "params" ? 0.5 : 0);
  return held.reduce((best, _, leaf) => (best === null || weight(leaf) > weight(best) ? leaf : best), null);
}

const total = (data, leaves) => leaves.reduce((sum, leaf) => sum + data.leaves.held[leaf], 0);

function header(role, rows, open) {
  const leaves = rows.flatMap((row) => row.leaves);
  const held = rows.reduce((sum, row) => sum + row.held, 0);
  return row({ kind: "role", key: `role ${role}`, role, path: role, leaves, held, level: 1, open });
}

const family = (data, role, path, leaves, at, opened) =>
  row({
    kind: "family",
    key: `family ${at}`,
    role,
    path,
    leaves,
    held: total(data, leaves),
    level: 2,
    open: opened.has(`family ${at}`),
    told: role === "params" && leaves[0] in data.short,
  });

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

const row = ({ told = false, ...fields }) => ({
  shared: 0,
  index: 0,
  of: 1,
  height: fields.kind === "role" ? HEIGHT.role : told ? HEIGHT.told : HEIGHT.leaf,
  ...fields,
});

function numbered(rows, from = 0, of = rows.length) {
  rows.forEach((each, i) => Object.assign(each, { index: from + i, of }));
  return rows;
}

/** Open families followed by their members; `shared` is how many parts a path has in common with the row above. */
function opens(data, rows, bySize) {
  const all = rows.flatMap((each) =>
    each.open ? [each, ...numbered(each.leaves.map((leaf) => single(data, each.role, leaf, 3)))] : [each],
  );
  all.forEach((each, i) => {
    each.shared = i && !bySize ? common(all[i - 1].path, each.path) : 0;
  });
  return all;
}

function common(above, path) {
  const [a, b] = [above.split("."), path.split(".")];
  let n = 0;
  while (n < b.length - 1 && a[n] === b[n]) n += 1;
  return n;
}
