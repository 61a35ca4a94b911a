// How the devices of a mesh are laid out on paper: which axes run down and which across, with which cells.

import { product } from "../shared/mesh.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @typedef {{ axis: number, size: number, unit: number }} Digit a step along it is `unit` indices of its axis */
/** @typedef {{ down: Digit[], across: Digit[], bands: number, plain?: boolean }} Way to lay out the axes */
/** @typedef {[row: number, column: number]} Cell */
/** @typedef {ReturnType<typeof sized> & { beside: boolean }} MeshPlan */

const FAR = 30; // px, the widest cell
const TALL = 24; // px, the highest cell
const LEAST = 14; // px, the least cell that can hold a number
const HIGHEST = 240; // px of all rows together
const DIGIT = 5.5; // px in the smallest type of numbers
const LETTER = 6.4; // px in the type of axis names

const divisors = (/** @type {number} */ n) => Array.from({ length: n }, (_, i) => i + 1).filter((i) => n % i === 0);

/**
 * The mesh as a grid at most `width` px wide. `down` and `across` are digits, outermost first. The first axis runs down
 * and the rest across where that leaves room for the devices' numbers, the longer way across where it doesn't; a very
 * long axis is broken into `bands` below each other. Further: `columns, rows` of cells `cw` by `ch` from the corner `x,
 * y` on, `gap` between groups, `w, h` of all cells, `numbers` (whether they fit), `width, height` with the labels,
 * `gutters` that these take on the left, `beside` (narrow enough to stand beside something).
 *
 * @param {Mesh} mesh
 * @param {number} width
 * @returns {MeshPlan}
 */
export function meshPlan(mesh, width) {
  const digits = String(Math.max(...mesh.devices)).length;
  const choices = candidates(mesh);
  const narrow = Math.min(150, 0.42 * width);
  for (const choice of choices.filter((c) => c.plain)) {
    const grid = sized(mesh, choice, narrow, digits);
    if (grid.numbers && grid.cw >= 20) return { ...grid, beside: true };
  }
  const grids = choices.map((choice) => sized(mesh, choice, width, digits));
  const numbered = grids.find((grid) => grid.numbers && (grid.bands === 1 || grid.plain));
  return { ...(numbered ?? grids.reduce(better)), beside: false };
}

/**
 * The larger cells, above 4 px the lower grid.
 *
 * @param {ReturnType<typeof sized>} a
 * @param {ReturnType<typeof sized>} b
 */
function better(a, b) {
  const cell = (/** @type {ReturnType<typeof sized>} */ grid) => Math.min(grid.cw, grid.ch, 4);
  return cell(b) > cell(a) || (cell(b) === cell(a) && b.height < a.height) ? b : a;
}

/**
 * All ways to lay out the axes, those in the mesh's order first; axes of one device are left out where there
 * are others. `plain` ones keep the order and break no axis, unless it is the only one.
 *
 * @param {Mesh} mesh
 * @returns {Way[]}
 */
function candidates(mesh) {
  const all = mesh.sizes.map((size, axis) => ({ axis, size, unit: 1 }));
  const longer = all.filter(({ size }) => size > 1);
  const axes = longer.length ? longer : all.slice(0, 1);
  const few = axes.length < 2;
  const splits = few ? [axes.length, 0] : axes.map((_, i) => i).slice(1);
  const cut = splits.map((at) => [axes.slice(0, at), axes.slice(at)]);
  const inOrder = cut.flatMap(([down, across]) => broken(down, across));
  const swapped = few ? [] : cut.flatMap(([across, down]) => broken(down, across));
  return [...inOrder.map((way) => ({ ...way, plain: few || way.bands === 1 })), ...swapped];
}

/**
 * Across in one row or, its outermost axis broken, in several bands below each other.
 *
 * @param {Digit[]} down
 * @param {Digit[]} across
 */
function broken(down, across) {
  if (!across.length) return [{ down, across, bands: 1 }];
  const [{ axis, size }, ...rest] = across;
  return divisors(size).map((bands) => {
    const length = size / bands;
    if (bands === 1) return { down, across, bands };
    const band = { axis, size: bands, unit: length };
    return { down: [band, ...down], across: [{ axis, size: length, unit: 1 }, ...rest], bands };
  });
}

/**
 * A way to lay out the axes with the largest cells that `width` has room for.
 *
 * @param {Mesh} mesh
 * @param {Way} way
 * @param {number} width
 * @param {number} digits
 */
function sized(mesh, way, width, digits) {
  const { down, across } = way;
  const columns = product(across.map(({ size }) => size));
  const rows = product(down.map(({ size }) => size));
  const gutters = gutter(down);
  const [x, y] = [gutters.reduce((sum, part) => sum + part, 0), header(across)];
  const cells = (/** @type {number} */ gap) => ({
    gap,
    cw: Math.min(FAR, fine((width - x - 2 - gaps(across, columns, gap)) / columns)),
    ch: Math.min(TALL, fine((HIGHEST - gaps(down, rows, gap)) / rows)),
  });
  let grid = cells(6);
  const numbers = grid.cw >= Math.max(LEAST, digits * DIGIT + 2) && grid.ch >= LEAST;
  if (!numbers) grid = cells(2);
  if (!numbers && across.length) grid.ch = Math.min(grid.ch, Math.max(grid.cw, 10));
  const w = along(across, columns, grid.cw, grid.gap);
  const h = along(down, rows, grid.ch, grid.gap);
  const inner = across.at(-1);
  const name = inner ? named(mesh, inner, numbers).length * LETTER : 0;
  const size = { width: Math.ceil(x + Math.max(w + 1, (w + name) / 2)), height: Math.ceil(y + h + 1) };
  return { ...way, ...grid, columns, rows, gutters, x, y, w, h, numbers, ...size };
}

/**
 * Cell sizes in whole px, small ones in halves, the smallest as they come.
 *
 * @param {number} size
 */
const fine = (size) => (size >= 6 ? Math.floor(size) : size >= 2 ? Math.floor(size * 2) / 2 : Math.max(size, 0.1));

/** @type {(digits: Digit[], count: number, gap: number) => number} */
const gaps = (digits, count, gap) => offset(digits, count - 1, 0, gap);

/**
 * How far from the first cell the cell number `i` begins: a gap after each group of an inner axis.
 *
 * @param {Digit[]} digits
 * @param {number} i
 * @param {number} cell
 * @param {number} gap
 */
export function offset(digits, i, cell, gap) {
  let group = 1;
  let at = i * cell;
  for (const { size } of digits.slice(1).toReversed()) {
    group *= size;
    at += Math.floor(i / group) * gap;
  }
  return at;
}

/**
 * The length of `count` cells with their gaps.
 *
 * @param {Digit[]} digits
 * @param {number} count
 * @param {number} cell
 * @param {number} gap
 */
export const along = (digits, count, cell, gap) => offset(digits, count - 1, cell, gap) + cell;

/**
 * The cell (column or row) at `px` from the first one, null in a gap or outside.
 *
 * @param {Digit[]} digits
 * @param {number} count
 * @param {number} cell
 * @param {number} gap
 * @param {number} px
 */
export function cellAt(digits, count, cell, gap, px) {
  let low = 0;
  let high = count - 1;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (offset(digits, middle, cell, gap) <= px) low = middle;
    else high = middle - 1;
  }
  const within = px - offset(digits, low, cell, gap);
  return within >= 0 && within <= cell + 0.5 ? low : null;
}

/**
 * `[row, column]` of the device at `position`.
 *
 * @param {Mesh} mesh
 * @param {Pick<MeshPlan, "down" | "across">} plan
 * @param {Sent.Position} position
 * @returns {Cell}
 */
export function cellOf(mesh, { down, across }, position) {
  const coords = mesh.coords(position);
  const at = (/** @type {Digit[]} */ digits) =>
    digits.reduce((sum, { axis, size, unit }) => sum * size + (Math.floor(coords[axis] / unit) % size), 0);
  return [at(down), at(across)];
}

/**
 * The device in this cell.
 *
 * @param {Mesh} mesh
 * @param {Pick<MeshPlan, "down" | "across">} plan
 * @param {number} row
 * @param {number} column
 */
export function deviceIn(mesh, { down, across }, row, column) {
  const coords = mesh.sizes.map(() => 0);
  const spread = (/** @type {Digit[]} */ digits, /** @type {number} */ number) => {
    for (const { axis, size, unit } of digits.toReversed()) {
      coords[axis] += (number % size) * unit;
      number = Math.floor(number / size);
    }
  };
  spread(down, row);
  spread(across, column);
  return mesh.position(coords);
}

/**
 * The device one step away from `position` in the picture, itself at an edge.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 * @param {Sent.Position} position
 * @param {number} down
 * @param {number} across
 */
export function neighbour(mesh, plan, position, down, across) {
  let [row, column] = cellOf(mesh, plan, position);
  row += down;
  column += across;
  if (plan.bands > 1 && (column < 0 || column >= plan.columns)) {
    row += (Math.sign(across) * plan.rows) / plan.bands;
    column = column < 0 ? plan.columns - 1 : 0;
  }
  const inside = row >= 0 && row < plan.rows && column >= 0 && column < plan.columns;
  return inside ? deviceIn(mesh, plan, row, column) : position;
}

/**
 * What is written along a digit: the axis, with its size where there is no room for its indices.
 *
 * @param {Mesh} mesh
 * @param {Digit} digit
 * @param {boolean} indices whether they are written
 */
export function named(mesh, { axis }, indices) {
  const name = mesh.names[axis] ?? "";
  const short = name.length > 16 ? `${name.slice(0, 15)}…` : name;
  return indices ? short : `${short} ${mesh.sizes[axis]}`;
}

export const LEVEL = 18; // px of one outer digit's labels
const INNER = 20; // px of the innermost digit's name and line

const header = (/** @type {Digit[]} */ across) => (across.length ? 36 + (across.length - 1) * LEVEL : 10);

/**
 * Widths left of the cells: a level for each outer digit, the innermost one, its indices.
 *
 * @param {Digit[]} down
 */
function gutter(down) {
  const inner = down.at(-1);
  if (!inner) return [2];
  const index = String((inner.size - 1) * inner.unit).length * 6 + 10;
  const name = inner.unit > 1 ? 0 : INNER;
  return [...down.slice(1).map(() => LEVEL), name, index];
}
