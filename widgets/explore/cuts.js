// The arithmetic of a cut array, by the names of mesh axes: the same as explorer/shard_sizes.py, and held to the same cases.

import { product } from "../shared/mesh.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Sizes } from "./worked.js" */

/** @type {(a: number, b: number) => number} */
const divisor = (a, b) => (b ? divisor(b, a % b) : a);

/**
 * Into how many pieces these axes cut; `sizes` is a Map of the mesh.
 *
 * @param {string[]} axes
 * @param {Sizes} sizes
 */
export const parts = (axes, sizes) => product(axes.map((axis) => /** @type {number} */ (sizes.get(axis))));

/**
 * Of what was wished for what the mesh can do: axes that it has, each once, that divide their dimension together.
 *
 * @param {Sent.Cut} wish
 * @param {number[]} shape
 * @param {Sizes} sizes
 */
export function fitting(wish, shape, sizes) {
  const used = new Set();
  return wish.map((axes, dim) => {
    const kept = [];
    for (const axis of axes) {
      if (!sizes.has(axis) || used.has(axis) || shape[dim] % parts([...kept, axis], sizes)) continue;
      kept.push(axis);
      used.add(axis);
    }
    return kept;
  });
}

/**
 * The next size, from `size` on, that each of these counts divides.
 *
 * @param {number} size
 * @param {number[]} counts
 */
export function nextSize(size, counts) {
  const step = counts.reduce((a, b) => (a * b) / divisor(a, b), 1);
  return Math.ceil(size / step) * step;
}

/**
 * Bytes of one device's part, of elements of so many bits.
 *
 * @param {number[]} shape
 * @param {number} bits
 * @param {Sent.Cut} cut
 * @param {Sizes} sizes
 */
export const held = (shape, bits, cut, sizes) =>
  Math.ceil((product(shape.map((size, dim) => size / parts(cut[dim], sizes))) * bits) / 8);

/**
 * On how many devices each slice lies.
 *
 * @param {Sent.Cut} cut
 * @param {Sizes} sizes
 */
export const copies = (cut, sizes) => product([...sizes.values()]) / product(cut.map((axes) => parts(axes, sizes)));

/**
 * @param {Sent.Cut} a
 * @param {Sent.Cut} b
 */
export const same = (a, b) => a.length === b.length && a.every((axes, dim) => axes.join("\0") === b[dim].join("\0"));
