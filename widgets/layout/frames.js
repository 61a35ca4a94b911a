// Where the blocks of an array are drawn: one frame, or a small one for each panel. All in px, no elements.

import { arranged, edges, labelled, offsets, panelCount, pieceAt } from "./plan.js";

const SHEET = { count: 3, right: 5, up: 4 }; // whole dimensions: so many edges of sheets behind a frame
const DIGIT = 5.5; // px of a digit in the offsets' type
const MOST_PANELS = 8;
const LEAST_PANEL = 56; // px wide
const LEAST_BLOCK = 4; // px: panels with smaller blocks are shown one by one
const BAR = 30; // height of an array of one dimension
const TICKS = 17; // px below a frame, for the offsets

/**
 * @param {number} value
 * @param {number} low
 * @param {number} high
 */
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

/** @import { Arranged } from "./plan.js" */
/** @import { Leaf } from "../shared/mesh.js" */
/** @typedef {ReturnType<typeof room>} Space that a picture has beside the rows' offsets and the sheets */
/** @typedef {{ dim: number, size: number, pieces: number, edges: number[] }} Side a dimension along a frame's edge */
/** @typedef {{ x: number, y: number, panel: number, outer: { left: boolean, bottom: boolean } }} Frame */

/**
 * @typedef {object} Framed
 * @property {ReturnType<typeof arranged>} plan
 * @property {{ column: Side | null, row: Side | null }} dims
 * @property {Frame[]} frames
 * @property {number} panels
 * @property {boolean} paged
 * @property {number} w
 * @property {number} h
 * @property {number} height
 * @property {number} titled px of the title above each frame
 * @property {{ count: number, right: number, up: number }} sheets
 * @property {{ column: [edge: number, text: string][], row: [edge: number, text: string][] }} ticks
 */

/**
 * The plan of `leaf` drawn `width` px wide with its frames from `top` (at least) on. All frames are `w` by `h`;
 * `paged`: only one panel is drawn, any of `panels`. A leaf without dimensions has no frames.
 *
 * @param {Leaf} leaf
 * @param {number} width
 * @returns {Framed}
 */
export function framed(leaf, width, top = 0) {
  const plan = arranged(leaf);
  const side = (/** @type {number | null} */ dim) =>
    dim === null ? null : sideOf(leaf.shape[dim], plan.pieces[dim], dim);
  const dims = { column: side(plan.column), row: side(plan.row) };
  if (plan.column === null) return { plan, dims, panels: 1, paged: false, ...NOTHING };
  const space = room(plan, dims, width);
  const panels = panelCount(plan);
  const grid = panels > 1 ? multiples(plan, dims, space, panels) : null;
  return {
    plan,
    dims,
    panels,
    paged: panels > 1 && !grid,
    ...placed(grid ?? single(dims, space), space, top, dims),
  };
}

/** Frames of a leaf that has none. */
const NOTHING = {
  frames: [],
  w: 0,
  h: 0,
  height: 0,
  titled: 0,
  sheets: { ...SHEET, count: 0 },
  ticks: { column: [], row: [] },
};

/** @type {(size: number, pieces: number, dim: number) => Side} */
const sideOf = (size, pieces, dim) => ({ dim, size, pieces, edges: edges(size, pieces) });

/**
 * What is left of `width` beside the rows' offsets and the sheets.
 *
 * @param {Arranged} plan
 * @param {Framed["dims"]} dims
 * @param {number} width
 */
function room(plan, { row }, width) {
  const digits = row ? String(row.pieces > 1 ? row.size : 0).length : 0;
  const left = row ? Math.max(16, Math.ceil(digits * DIGIT) + 11) : 1;
  const sheets = plan.whole.length ? SHEET.count : 0;
  return { left, sheets, width: Math.floor(width - left - sheets * SHEET.right - 2) };
}

/**
 * A frame's height: long arrays are drawn longer, but not by as much.
 *
 * @param {Framed["dims"]} dims
 * @param {number} w
 * @param {number} low
 * @param {number} high
 */
function heightOf({ row, column }, w, low, high) {
  if (!row) return BAR;
  const natural = w * (Math.max(1, row.size) / Math.max(1, column?.size ?? 1)) ** 0.28;
  return Math.round(clamp(natural, row.pieces > 8 ? high : low, high));
}

/**
 * @param {Framed["dims"]} dims
 * @param {Space} space
 */
const single = (dims, space) => ({
  columns: 1,
  rows: 1,
  count: 1,
  gap: 0,
  w: space.width,
  h: heightOf(dims, space.width, 76, 150),
});

/**
 * All panels beside and below each other, null if they are too many or too small for that.
 *
 * @param {Arranged} plan
 * @param {Framed["dims"]} dims
 * @param {Space} space
 * @param {number} count
 */
function multiples({ pieces, panels }, dims, space, count) {
  if (count > MOST_PANELS) return null;
  const gap = 14 + space.sheets * SHEET.right;
  let columns = clamp(Math.floor((space.width + gap) / (LEAST_PANEL + gap)), 1, count);
  const inner = pieces[panels[panels.length - 1]];
  if (panels.length > 1 && inner <= columns) columns = inner;
  columns = Math.ceil(count / Math.ceil(count / columns));
  const w = Math.floor((space.width - (columns - 1) * gap) / columns);
  const h = heightOf(dims, w, 44, 100);
  const fits = w / (dims.column?.pieces ?? 1) >= LEAST_BLOCK && (!dims.row || h / dims.row.pieces >= LEAST_BLOCK);
  return fits ? { columns, rows: Math.ceil(count / columns), count, gap, w, h } : null;
}

/**
 * @param {ReturnType<typeof single>} grid
 * @param {Space} space
 * @param {number} top
 * @param {Framed["dims"]} dims
 */
function placed({ columns, rows, count, gap, w, h }, { left, sheets }, top, dims) {
  const behind = sheets * SHEET.up;
  const title = count > 1 ? 14 : 0;
  const first = Math.max(top, (sheets ? 14 : 2) + title + behind);
  const pitch = h + title + behind + 10;
  const frames = Array.from({ length: count }, (_, panel) => ({
    x: left + (panel % columns) * (w + gap),
    y: first + Math.floor(panel / columns) * pitch,
    panel,
    outer: { left: panel % columns === 0, bottom: panel + columns >= count },
  }));
  const height = first + (rows - 1) * pitch + h + TICKS;
  return {
    frames,
    w,
    h,
    height,
    titled: title,
    sheets: { ...SHEET, count: sheets },
    ticks: ticks(dims, w, h),
  };
}

/**
 * The offsets written along both edges: `[[edge number, text], ...]`.
 *
 * @param {Framed["dims"]} dims
 * @param {number} w
 * @param {number} h
 */
function ticks({ column, row }, w, h) {
  /** @type {(part: Side, length: number, each: (digits: number) => number) => [edge: number, text: string][]} */
  const at = (part, length, each) => {
    const values = offsets(part.size, part.pieces);
    const shown = part.size ? labelled(part.pieces, length, each(String(part.size).length)) : [0, part.pieces];
    return shown.map((i) => [i, String(values[i])]);
  };
  return {
    column: column ? at(column, w, (digits) => 1.5 * digits * DIGIT + 3) : [],
    row: row ? at(row, h, () => 14).slice(0, -1) : [],
  };
}

/**
 * The frame, and the place in it, under a point: `{panel, down, across}`, null beside all frames.
 *
 * @param {Framed} picture
 * @param {number} x
 * @param {number} y
 */
export function under({ frames, w, h, dims }, x, y) {
  const frame = frames.find((f) => x >= f.x && x <= f.x + w && y >= f.y && y <= f.y + h);
  if (!frame) return null;
  const place = (/** @type {Side | null} */ part, /** @type {number} */ share) =>
    part ? pieceAt(share, part.size, part.pieces) : 0;
  return {
    panel: frame.panel,
    down: place(dims.row, (y - frame.y) / h),
    across: place(dims.column, (x - frame.x) / w),
  };
}
