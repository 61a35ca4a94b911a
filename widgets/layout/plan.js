// How an array is laid out on paper, in numbers alone: which of its dimensions run across and down, which
// make panels, where they are cut and who holds a block.

import { count } from "../shared/format.js";
import { blockOf, copies, cuts, holders, product, sliceOf } from "../shared/mesh.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Leaf, Mesh } from "../shared/mesh.js" */

/** @typedef {ReturnType<typeof arranged>} Arranged */

/**
 * The dimension that runs across (`column`) and the one that runs down (`row`): the last two that are cut,
 * else the last ones; null where there is none. Further cut dimensions make `panels`, whole ones lie behind as
 * sheets.
 *
 * @param {Leaf} leaf
 */
export function arranged(leaf) {
  const pieces = cuts(leaf);
  const dims = pieces.map((_, dim) => dim);
  const cut = dims.filter((dim) => pieces[dim] > 1);
  const uncut = dims.filter((dim) => pieces[dim] === 1).reverse();
  const drawn = [...cut.slice(-2), ...uncut].slice(0, 2).sort((a, b) => a - b);
  return {
    pieces,
    column: drawn.at(-1) ?? null,
    row: drawn.length > 1 ? drawn[0] : null,
    panels: cut.slice(0, -2),
    whole: dims.filter((dim) => pieces[dim] === 1 && !drawn.includes(dim)),
  };
}

/**
 * Where the pieces of a dimension start, and where the last one stops: the last may be smaller, or empty.
 *
 * @param {number} size
 * @param {number} pieces
 */
export function offsets(size, pieces) {
  const step = Math.ceil(size / pieces);
  return Array.from({ length: pieces + 1 }, (_, i) => Math.min(i * step, size));
}

/**
 * The same as shares of the dimension's length; a dimension of size 0 is drawn as if it had some.
 *
 * @param {number} size
 * @param {number} pieces
 */
export const edges = (size, pieces) => offsets(size || pieces, pieces).map((offset) => offset / (size || pieces));

/**
 * The piece that lies at `share` (0 to 1) of a dimension's length.
 *
 * @param {number} share
 * @param {number} size
 * @param {number} pieces
 */
export function pieceAt(share, size, pieces) {
  const step = Math.ceil((size || pieces) / pieces);
  const last = Math.ceil((size || pieces) / step) - 1;
  return Math.max(0, Math.min(last, Math.floor((share * (size || pieces)) / step)));
}

/**
 * The cuts of a dimension of a leaf over `axes`, by the axis that makes them: `[{axis, pieces, at}]`, outermost first.
 * Cut `i` lies before piece `i`; `pieces` is the number of parts that this axis and those outside it make.
 *
 * @param {Pick<Leaf, "sizes">} leaf
 * @param {number[]} axes
 */
export function cutLines({ sizes }, axes) {
  const total = product(axes.map((axis) => sizes[axis]));
  let outer = 1;
  return axes.flatMap((axis) => {
    const step = total / outer;
    const inner = step / sizes[axis];
    outer *= sizes[axis];
    const at = [];
    for (let i = inner; i < total; i += inner) if (i % step) at.push(i);
    return at.length ? [{ axis, pieces: outer, at }] : [];
  });
}

/**
 * Which of `count` marks in a row get a label when there is `room` for all of them together and each label
 * takes `each`: every one, or every second, third, ... that divides the row evenly. Both ends always do.
 *
 * @param {number} count
 * @param {number} room
 * @param {number} each
 */
export function labelled(count, room, each) {
  let step = 1;
  while (step < count && (count % step || (room * step) / count < each)) step += 1;
  return Array.from({ length: count / step + 1 }, (_, i) => i * step);
}

/**
 * How many panels the cut dimensions that are neither row nor column make.
 *
 * @param {Pick<Arranged, "pieces" | "panels">} plan
 */
export const panelCount = ({ pieces, panels }) => product(panels.map((dim) => pieces[dim]));

/**
 * The number of the panel that `block` (one index per dimension) lies in.
 *
 * @param {Pick<Arranged, "pieces" | "panels">} plan
 * @param {number[]} block
 */
export const panelOf = ({ pieces, panels }, block) =>
  panels.reduce((number, dim) => number * pieces[dim] + block[dim], 0);

/**
 * The block at this place of a panel.
 *
 * @param {Arranged} plan
 * @param {number} panel
 * @param {number} down
 * @param {number} across
 */
export function blockAt({ pieces, panels, row, column }, panel, down, across) {
  const block = pieces.map(() => 0);
  for (const dim of panels.toReversed()) {
    block[dim] = panel % pieces[dim];
    panel = Math.floor(panel / pieces[dim]);
  }
  if (row !== null) block[row] = down;
  if (column !== null) block[column] = across;
  return block;
}

/**
 * The block that lies `[down, across]` of `block` as it would be in `panel`, or as many `pages` further; past
 * the right or left edge lies the next panel. `block` itself where there is none.
 *
 * @param {Arranged} plan
 * @param {number[]} block
 * @param {number} panel
 * @param {number[]} by
 * @param {number} pages
 */
export function moved(plan, block, panel, [down, across], pages) {
  const { pieces, row, column } = plan;
  if (column === null) return block;
  const to = block[column] + across;
  const on = panel + pages + (to < 0 ? -1 : to === pieces[column] ? 1 : 0);
  if (on < 0 || on === panelCount(plan)) return block;
  const at = row === null ? 0 : Math.max(0, Math.min(pieces[row] - 1, block[row] + down));
  return blockAt(plan, on, at, (to + pieces[column]) % pieces[column]);
}

/**
 * A device that holds `block`: the one that is placed as `like` along all axes that do not cut the array, as near to it
 * as the array lies.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {number[]} block
 */
export function holderOf(mesh, leaf, block, like = 0) {
  const { starts, sizes } = leaf;
  const near = (/** @type {number} */ at, /** @type {number} */ axis) =>
    Math.max(starts[axis], Math.min(starts[axis] + sizes[axis] - 1, at));
  const coords = mesh.coords(like).map(near);
  leaf.spec.forEach((axes, dim) => {
    let at = block[dim];
    for (const axis of axes.toReversed()) {
      coords[axis] = starts[axis] + (at % sizes[axis]);
      at = Math.floor(at / sizes[axis]);
    }
  });
  return mesh.position(coords);
}

/**
 * Whether the device at `position` holds `block`.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position | null} position
 * @param {number[]} block
 */
export const holds = (mesh, leaf, position, block) =>
  position !== null && (blockOf(mesh, leaf, position)?.every((at, dim) => at === block[dim]) ?? false);

/**
 * The bytes that the device at `position` holds: not the same for all where a dimension does not divide.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 */
export function heldAt(mesh, leaf, position) {
  const pieces = cuts(leaf);
  if (leaf.shape.every((size, dim) => size % pieces[dim] === 0)) return leaf.held;
  const part = sliceOf(mesh, leaf, position).map((range, dim) =>
    range ? (range[1] - range[0]) / (leaf.shape[dim] || 1) : 1,
  );
  return Math.round(leaf.bytes * product(part));
}

export const LEAST_NUMBER = 14; // px that a block with a number has at least, either way
const CHAR = 6.1; // px of a digit in the marks' type
const LINE = 13;
const MOST_LISTED = 32;
const TIMES = "×";

/**
 * The ids of the devices that hold `block` as texts; where they are too many to list, `×64` alone.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {number[]} block
 */
export function holderTexts(mesh, leaf, block) {
  const n = copies(leaf);
  if (n > MOST_LISTED) return [TIMES + count(n)];
  return holders(mesh, leaf, holderOf(mesh, leaf, block)).map((position) => String(mesh.devices[position]));
}

/**
 * Whether a text tells how many devices there are, not which.
 *
 * @param {string} text
 */
export const isCount = (text) => text.startsWith(TIMES);

/**
 * The texts of a block's holders in lines that fit `width` by `height`, else how many, else null.
 *
 * @param {string[]} texts
 * @param {number} width
 * @param {number} height
 */
export function listed(texts, width, height) {
  if (Math.min(width, height) < LEAST_NUMBER) return null;
  const each = (Math.max(...texts.map((text) => text.length)) + 1) * CHAR;
  const most = Math.floor((width - 2 + CHAR) / each);
  const lines = Math.ceil(texts.length / most);
  if (most > 0 && lines * LINE <= height) {
    const per = Math.ceil(texts.length / lines);
    return Array.from({ length: lines }, (_, i) => texts.slice(i * per, (i + 1) * per));
  }
  const many = TIMES + count(texts.length);
  return many.length * CHAR + 2 <= width ? [[many]] : null;
}
