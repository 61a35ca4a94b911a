// The arithmetic of layouts: which block of an array each device holds. Positions count the mesh's devices
// row-major; ids are what the runtime calls them.

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);

/** The mesh of a payload: names, sizes, the ids of its devices, and coordinates there and back. */
export class Mesh {
  constructor({ axes, devices, text }) {
    this.names = axes.map(([name]) => name);
    this.sizes = axes.map(([, size]) => size);
    this.count = product(this.sizes);
    this.devices = devices.length ? devices : Array.from({ length: this.count }, (_, i) => i);
    this.text = text;
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

  /** The position of a device id, null for none of this mesh. */
  find(id) {
    const at = id === null ? -1 : this.devices.indexOf(id);
    return at < 0 ? null : at;
  }
}

/** Leaf `index` of the payload's columns; `spec` has a list of axis indices, major first, per dimension. */
export function leafAt(data, index) {
  const { path, role, dtype, shape, spec, bytes, held, why } = data.leaves;
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
  };
}

/** Into how many pieces each dimension is cut. */
export const cuts = (mesh, leaf) => leaf.spec.map((axes) => product(axes.map((axis) => mesh.sizes[axis])));

/** The index along each dimension of the block that the device at `position` holds. */
export function blockOf(mesh, leaf, position) {
  const coords = mesh.coords(position);
  return leaf.spec.map((axes) => axes.reduce((at, axis) => at * mesh.sizes[axis] + coords[axis], 0));
}

/** `[start, stop]` of that block along each dimension, null for a dimension that is whole. */
export function sliceOf(mesh, leaf, position) {
  const pieces = cuts(mesh, leaf);
  return blockOf(mesh, leaf, position).map((at, i) => {
    if (pieces[i] === 1) return null;
    const step = Math.ceil(leaf.shape[i] / pieces[i]);
    return [Math.min(at * step, leaf.shape[i]), Math.min((at + 1) * step, leaf.shape[i])];
  });
}

/** `[:, 6:12]` as NumPy writes it. */
export const sliceText = (slice) =>
  `[${slice.map((range) => (range ? `${range[0]}:${range[1]}` : ":")).join(", ")}]`;

/** On how many devices each block lies. */
export const copies = (mesh, leaf) => mesh.count / Math.max(1, product(cuts(mesh, leaf)));

/** Axes, of more than one device, that cut nothing of the leaf: it is the same all along them. */
export function uncutAxes(mesh, leaf) {
  const used = new Set(leaf.spec.flat());
  return mesh.names.map((_, axis) => axis).filter((axis) => !used.has(axis) && mesh.sizes[axis] > 1);
}

/** The positions whose devices hold the same block as `position`, itself among them, ascending. */
export function holders(mesh, leaf, position) {
  const free = uncutAxes(mesh, leaf);
  let found = [mesh.coords(position)];
  for (const axis of free) {
    found = found.flatMap((coords) =>
      Array.from({ length: mesh.sizes[axis] }, (_, i) => coords.with(axis, i)),
    );
  }
  return found.map((coords) => mesh.position(coords)).sort((a, b) => a - b);
}
