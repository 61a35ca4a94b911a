// Actions too narrow to draw: each column of pixels is filled by the shares of the kinds in it.

import { KINDS } from "./events.js";

/** @import { Palette } from "./colours.js" */
/** @import { Lane } from "./events.js" */

const ALL = KINDS.length;
const LEAST = 6; // device px of a column in which shares are told apart; a lower one is of their mean colour
const HATCH = 3; // a bubble's hatch has a line where these bits of row and column together are 0

/**
 * The share of each kind in each of `columns` columns between two times, kind by kind for each column, by the times
 * `start` and `end` of a lane's events.
 *
 * @param {Pick<Lane, "count" | "first" | "kind">} lane
 * @param {Float64Array} start
 * @param {Float64Array} end
 * @param {number} from
 * @param {number} to
 * @param {number} columns
 */
export function sharesOf({ count, first, kind }, start, end, from, to, columns) {
  const shares = new Float32Array(ALL * columns);
  const scale = columns / (to - from);
  for (let i = 0; i < count; i += 1) {
    if (end[i] <= from || start[i] >= to) continue;
    const [a, b] = [Math.max(0, (start[i] - from) * scale), Math.min(columns, (end[i] - from) * scale)];
    const parts = first[i + 1] - first[i];
    for (let at = Math.floor(a); at < b; at += 1) {
      const share = (Math.min(b, at + 1) - Math.max(a, at)) / parts;
      for (let part = first[i]; part < first[i + 1]; part += 1) shares[ALL * at + kind[part]] += share;
    }
  }
  return shares;
}

/**
 * Draw columns of `height` device px from the canvas' `y` on, which is in device px, too, so opaque as `alpha` says.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {ReturnType<typeof sharesOf>} shares
 * @param {number} y
 * @param {number} height
 * @param {Palette["bytes"]} colours
 */
export function fillColumns(context, shares, y, height, { bg, hatch, kinds }, alpha = 1) {
  const columns = shares.length / ALL;
  const image = imageOf(context, columns, height);
  const inks = Uint32Array.from(kinds, (ink) => packed(ink.map((c, i) => bg[i] + alpha * (c - bg[i]))));
  const [ground, line] = [packed(bg), packed(hatch)];
  const pixels = new Uint32Array(image.data.buffer);
  for (let at = 0; at < columns; at += 1) {
    if (height < LEAST) {
      const ink = mixed(shares.subarray(ALL * at, ALL * at + ALL), bg, kinds);
      for (let row = 0; row < height; row += 1) pixels[row * columns + at] = ink;
      continue;
    }
    let [row, sum] = [0, 0];
    for (let kind = 0; kind < ALL; kind += 1) {
      sum += shares[ALL * at + kind];
      const stop = Math.min(height, Math.round(sum * height));
      for (; row < stop; row += 1) pixels[row * columns + at] = inks[kind];
    }
    for (; row < height; row += 1) pixels[row * columns + at] = (at + row) & HATCH ? ground : line;
  }
  context.putImageData(image, 0, y);
}

/**
 * The mean of the ground and the kinds by their shares.
 *
 * @param {Float32Array} shares
 * @param {number[]} bg
 * @param {number[][]} kinds
 */
const mixed = (shares, bg, kinds) =>
  packed(bg.map((c, i) => c + kinds.reduce((sum, kind, k) => sum + shares[k] * (kind[i] - c), 0)));

const images = new WeakMap(); // the last of each height, by context: one a frame would keep the collector busy

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} columns
 * @param {number} height
 */
function imageOf(context, columns, height) {
  if (!images.has(context)) images.set(context, new Map());
  const own = images.get(context);
  if (own.get(height)?.width !== columns) own.set(height, context.createImageData(columns, height));
  return own.get(height);
}

/** @param {number[]} colour */
const packed = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
