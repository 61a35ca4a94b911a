// The arithmetic of layouts: which block of an array each device holds. Positions count the mesh's devices
// row-major; ids are what the runtime calls them.

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);

/** The mesh of a payload: names, sizes, the ids of its devices, and coordinates there and back. */
export class Mesh {
  constructor({ axes, devices, text, hosts = [] }) {
    this.names = axes.map(([name]) => name);
    this.sizes = axes.map(([, size]) => size);
    this.count = product(this.sizes);
    this.devices = devices.length ? devices : Array.from({ length: this.count }, (_, i) => i);
    this.text = text;
    this.hosts = hosts; // of each device, none where all are on one
    this.strides = this.sizes.map((_, i) => product(this.sizes.slice(i + 1)));
  }

  /** One index per axis. */
  coords(position) {
    return this.strides.map((stride, i) => Math.floor(position / stride) % this.sizes[i]);
  }

  /** The position of the device at these coordinates. */
  position(coords) {
    return coords.reduce((sum, index, i) => sum + index * this.strides[i], 0);
  }

  /** Whether two devices are on different hosts. */
  apart(one, other) {
    return this.hosts.length > 0 && this.hosts[one] !== this.hosts[other];
  }

  /** The position of a device id, null for none of this mesh. */
  find(id) {
    const at = id === null ? -1 : this.devices.indexOf(id);
    return at < 0 ? null : at;
  }
}

/**
 * Leaf `index` of the payload's columns; `spec` has a list of axis indices, major first, per dimension. `within` has
 * `[axis, first, end]` for each axis along which it lies only on the devices from `first` on, before `end`; `starts` and
 * `sizes` say for every axis where those that it lies on begin, and how many there are.
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

/** `[[axis, first, end], ...]`, nothing for a leaf on the whole mesh. */
export const withinOf = (data, index) => data.withins[data.leaves.within[index]];

/** Whether the device at `position` holds anything of the leaf. */
export function lies(mesh, { within }, position) {
  const coords = mesh.coords(position);
  return within.every(([axis, first, end]) => first <= coords[axis] && coords[axis] < end);
}

/** The positions of all devices that the leaf lies on, ascending. */
export const places = (mesh, leaf) =>
  Array.from({ length: mesh.count }, (_, position) => position).filter((position) => lies(mesh, leaf, position));

/** Bytes of `leaves` (indices) on the device that holds most of them. */
export function fullest(data, leaves) {
  const sums = new Map(); // by the part of the mesh
  for (const leaf of leaves) {
    const part = data.leaves.within[leaf];
    sums.set(part, (sums.get(part) ?? 0) + data.leaves.held[leaf]);
  }
  const parts = [...sums].map(([part, held]) => [data.withins[part], held]);
  const starts = new Map();
  for (const [axis, first] of parts.flatMap(([within]) => within)) {
    starts.set(axis, (starts.get(axis) ?? new Set([0])).add(first));
  }
  let corners = [new Map()]; // what lies on a device grows at the start of a part alone
  for (const [axis, found] of starts) {
    corners = corners.flatMap((at) => [...found].map((first) => new Map(at).set(axis, first)));
  }
  const on =
    (at) =>
    ([within]) =>
      within.every(([axis, first, end]) => first <= at.get(axis) && at.get(axis) < end);
  return Math.max(...corners.map((at) => parts.filter(on(at)).reduce((all, [, held]) => all + held, 0)));
}

/** Into how many pieces each dimension is cut. */
export const cuts = (leaf) => leaf.spec.map((axes) => product(axes.map((axis) => leaf.sizes[axis])));

/** The index along each dimension of the block that the device at `position` holds, null where it holds none. */
export function blockOf(mesh, leaf, position) {
  if (!lies(mesh, leaf, position)) return null;
  const coords = mesh.coords(position).map((at, axis) => at - leaf.starts[axis]);
  return leaf.spec.map((axes) => axes.reduce((at, axis) => at * leaf.sizes[axis] + coords[axis], 0));
}

/** `[start, stop]` of that block along each dimension, null for a dimension that is whole; for one of its devices. */
export function sliceOf(mesh, leaf, position) {
  const pieces = cuts(leaf);
  return blockOf(mesh, leaf, position).map((at, i) => {
    if (pieces[i] === 1) return null;
    const step = Math.ceil(leaf.shape[i] / pieces[i]);
    return [Math.min(at * step, leaf.shape[i]), Math.min((at + 1) * step, leaf.shape[i])];
  });
}

/** `[:, 6:12]` as NumPy writes it. */
export const sliceText = (slice) => `[${slice.map((range) => (range ? `${range[0]}:${range[1]}` : ":")).join(", ")}]`;

/** On how many devices each block lies. */
export const copies = (leaf) => product(leaf.sizes) / Math.max(1, product(cuts(leaf)));

/** Axes, of more than one of its devices, that cut nothing of the leaf: it is the same all along them. */
export function uncutAxes(mesh, leaf) {
  const used = new Set(leaf.spec.flat());
  return mesh.names.map((_, axis) => axis).filter((axis) => !used.has(axis) && leaf.sizes[axis] > 1);
}

/** The positions whose devices hold the same block as `position`, itself among them, ascending; none beside the leaf. */
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
