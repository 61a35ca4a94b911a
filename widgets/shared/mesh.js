// The arithmetic of layouts: which block of an array each device holds. Positions count the mesh's devices
// row-major; ids are what the runtime calls them.

/** @import * as Sent from "./payload_types.js" */

/**
 * What of a report the arithmetic of its leaves reads.
 *
 * @typedef {Pick<Sent.Report, "leaves" | "mesh" | "whys" | "withins" | "short">} LeafData
 */

/**
 * A leaf, made from the payload's columns by `leafAt`.
 *
 * @typedef {ReturnType<typeof leafAt>} Leaf
 */

/**
 * The names of mesh axes, by index: of a mesh, or of all that a view has.
 *
 * @typedef {Pick<Mesh, "names">} AxisNames
 */

/** @param {number[]} numbers */
export const product = (numbers) => numbers.reduce((a, b) => a * b, 1);

/** The mesh of a payload: names, sizes, the ids of its devices, and coordinates there and back. */
export class Mesh {
  /** @param {Pick<Sent.Mesh, "axes" | "devices" | "text"> & Partial<Sent.Mesh>} data */
  constructor({ axes, devices, text, hosts = [] }) {
    this.names = axes.map(([name]) => name);
    this.sizes = axes.map(([, size]) => size);
    this.count = product(this.sizes);
    this.devices = devices.length ? devices : Array.from({ length: this.count }, (_, i) => i);
    this.text = text;
    this.hosts = hosts; // of each device, none where all are on one
    this.strides = this.sizes.map((_, i) => product(this.sizes.slice(i + 1)));
  }

  /**
   * One index per axis.
   *
   * @param {Sent.Position} position
   */
  coords(position) {
    return this.strides.map((stride, i) => Math.floor(position / stride) % this.sizes[i]);
  }

  /**
   * The position of the device at these coordinates.
   *
   * @param {number[]} coords
   */
  position(coords) {
    return coords.reduce((sum, index, i) => sum + index * this.strides[i], 0);
  }

  /**
   * Whether two devices are on different hosts.
   *
   * @param {Sent.Position} one
   * @param {Sent.Position} other
   */
  apart(one, other) {
    return this.hosts.length > 0 && this.hosts[one] !== this.hosts[other];
  }

  /**
   * The position of a device id, null for none of this mesh.
   *
   * @param {number | null} id
   */
  find(id) {
    const at = id === null ? -1 : this.devices.indexOf(id);
    return at < 0 ? null : at;
  }
}

/**
 * Leaf `index` of the payload's columns; `spec` has a list of axis indices, major first, per dimension. `within` has
 * `[axis, first, end]` for each axis along which it lies only on the devices from `first` on, before `end`; `starts`
 * and `sizes` say for every axis where those that it lies on begin, and how many there are.
 *
 * @param {LeafData} data
 * @param {number} index
 */
export function leafAt(data, index) {
  const { path, role, dtype, shape, spec, bytes, held, why } = data.leaves;
  const within = withinOf(data, index);
  const sizes = data.mesh.axes.map(([, size]) => size);
  const starts = sizes.map(() => 0);
  for (const [axis, first, end] of within) [starts[axis], sizes[axis]] = [first, end - first];
  return {
    index,
    path: path[index],
    role: role[index],
    dtype: dtype[index],
    shape: shape[index],
    spec: shape[index].map((_, i) => spec[index][i] ?? []),
    bytes: bytes[index],
    held: held[index],
    why: data.whys[why[index]],
    short: data.short[index] ?? null,
    within,
    starts,
    sizes,
  };
}

/**
 * `[[axis, first, end], ...]`, nothing for a leaf on the whole mesh.
 *
 * @param {Pick<LeafData, "leaves" | "withins">} data
 * @param {number} index
 */
export const withinOf = (data, index) => data.withins[data.leaves.within[index]];

/**
 * @param {number} at
 * @param {number} first
 * @param {number} end
 */
const inside = (at, first, end) => first <= at && at < end;

/**
 * Whether the device at `position` holds anything of the leaf.
 *
 * @param {Mesh} mesh
 * @param {Pick<Leaf, "within">} leaf
 * @param {Sent.Position} position
 */
export function lies(mesh, { within }, position) {
  const coords = mesh.coords(position);
  return within.every(([axis, first, end]) => inside(coords[axis], first, end));
}

/**
 * The positions of all devices that the leaf lies on, ascending.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
export const places = (mesh, leaf) =>
  Array.from({ length: mesh.count }, (_, position) => position).filter((position) => lies(mesh, leaf, position));

/**
 * Bytes of `leaves` (indices) on the device that holds most of them.
 *
 * @param {Pick<LeafData, "leaves" | "withins">} data
 * @param {number[]} leaves
 */
export function fullest(data, leaves) {
  /** @type {Map<number, number>} */
  const sums = new Map(); // by the part of the mesh
  for (const leaf of leaves) {
    const part = data.leaves.within[leaf];
    sums.set(part, (sums.get(part) ?? 0) + data.leaves.held[leaf]);
  }
  const parts = [...sums].map(([part, held]) => ({ within: data.withins[part], held }));
  /** @type {Map<number, Set<number>>} */
  const starts = new Map();
  for (const [axis, first] of parts.flatMap(({ within }) => within)) {
    starts.set(axis, (starts.get(axis) ?? new Set([0])).add(first));
  }
  let corners = [/** @type {Map<number, number>} */ (new Map())]; // what lies on a device grows at the start of a part alone
  for (const [axis, found] of starts) {
    corners = corners.flatMap((at) => [...found].map((first) => new Map(at).set(axis, first)));
  }
  const heldAt = (/** @type {Map<number, number>} */ at) =>
    parts
      .filter(({ within }) =>
        within.every(([axis, first, end]) => inside(/** @type {number} */ (at.get(axis)), first, end)),
      )
      .reduce((all, { held }) => all + held, 0);
  return Math.max(...corners.map(heldAt));
}

/**
 * Into how many pieces each dimension is cut.
 *
 * @param {Leaf} leaf
 */
export const cuts = (leaf) => leaf.spec.map((axes) => product(axes.map((axis) => leaf.sizes[axis])));

/**
 * The index along each dimension of the block that the device at `position` holds, null where it holds none.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 */
export function blockOf(mesh, leaf, position) {
  if (!lies(mesh, leaf, position)) return null;
  const coords = mesh.coords(position).map((at, axis) => at - leaf.starts[axis]);
  return leaf.spec.map((axes) => axes.reduce((at, axis) => at * leaf.sizes[axis] + coords[axis], 0));
}

/**
 * `[start, stop]` of that block along each dimension, null for a dimension that is whole; for one of its devices.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 * @returns {(number[] | null)[]}
 */
export function sliceOf(mesh, leaf, position) {
  const pieces = cuts(leaf);
  return /** @type {number[]} */ (blockOf(mesh, leaf, position)).map((at, i) => {
    if (pieces[i] === 1) return null;
    const step = Math.ceil(leaf.shape[i] / pieces[i]);
    return [Math.min(at * step, leaf.shape[i]), Math.min((at + 1) * step, leaf.shape[i])];
  });
}

/**
 * `[:, 6:12]` as NumPy writes it.
 *
 * @param {(number[] | null)[]} slice
 */
export const sliceText = (slice) => `[${slice.map((range) => (range ? `${range[0]}:${range[1]}` : ":")).join(", ")}]`;

/**
 * On how many devices each block lies.
 *
 * @param {Leaf} leaf
 */
export const copies = (leaf) => product(leaf.sizes) / Math.max(1, product(cuts(leaf)));

/**
 * Axes, of more than one of its devices, that cut nothing of the leaf: it is the same all along them.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 */
export function uncutAxes(mesh, leaf) {
  const used = new Set(leaf.spec.flat());
  return mesh.names.map((_, axis) => axis).filter((axis) => !used.has(axis) && leaf.sizes[axis] > 1);
}

/**
 * The positions whose devices hold the same block as `position`, itself among them, ascending; none beside the leaf.
 *
 * @param {Mesh} mesh
 * @param {Leaf} leaf
 * @param {Sent.Position} position
 */
export function holders(mesh, leaf, position) {
  if (!lies(mesh, leaf, position)) return [];
  const free = uncutAxes(mesh, leaf);
  let found = [mesh.coords(position)];
  for (const axis of free) {
    found = found.flatMap((coords) =>
      Array.from({ length: leaf.sizes[axis] }, (_, i) => coords.with(axis, leaf.starts[axis] + i)),
    );
  }
  return found.map((coords) => mesh.position(coords)).sort((a, b) => a - b);
}
