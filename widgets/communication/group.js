// Which devices talk to each other, as a mesh of a few pixels in which the first group stands out.

import { hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";
import { count } from "../shared/format.js";
import { product } from "../shared/mesh.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

const [WIDTH, HEIGHT] = [48, 16]; // px of all cells
const PITCH = 6; // px from cell to cell, at most
const NAMED = 8; // devices that the label names

/**
 * The first axis across and the others down; a long axis is drawn with fewer devices than it has.
 *
 * @param {number[]} axes
 * @param {Mesh} mesh
 */
export function groupGlyph(axes, mesh) {
  const sizes = shrunk(mesh.sizes);
  const [columns, rows] = [sizes[0] ?? 1, product(sizes.slice(1))];
  const pitch = Math.max(1, Math.min(PITCH, Math.floor(WIDTH / columns), Math.floor(HEIGHT / rows)));
  const side = pitch > 2 ? pitch - 1 : pitch;
  const fill = axes.length === 1 ? hue(axes[0]) : "var(--jsm-ink-2)";
  const square = (/** @type {number} */ x, /** @type {number} */ y) =>
    `M${x * pitch} ${y * pitch}h${side}v${side}h-${side}z`;
  /** @type {string[][]} */
  const [ours, others] = [[], []];
  for (let at = 0; at < columns * rows; at += 1) {
    const [x, y] = [Math.floor(at / rows), at % rows];
    (together(at, sizes, axes) ? ours : others).push(square(x, y));
  }
  const label = spoken(axes, mesh);
  return s(
    "svg",
    { width: columns * pitch, height: rows * pitch, role: "img", "aria-label": label },
    s("title", {}, label),
    s("path", { d: others.join(""), fill: "var(--jsm-fill-2)" }),
    s("path", { d: ours.join(""), fill }),
  );
}

/**
 * Sizes that can be drawn: the largest of those down are halved until all fit, but an axis stays one.
 *
 * @param {number[]} sizes
 */
function shrunk([first = 1, ...down]) {
  const rest = [...down];
  while (product(rest) > HEIGHT / 2 && Math.max(...rest) > 2) {
    const at = rest.indexOf(Math.max(...rest));
    rest[at] = Math.max(2, Math.floor(rest[at] / 2));
  }
  return [Math.min(first, WIDTH / 2), ...rest];
}

/**
 * Whether the device at `position` is in the first group: it lies at the start of every other axis.
 *
 * @param {Sent.Position} position
 * @param {number[]} sizes
 * @param {number[]} axes
 */
function together(position, sizes, axes) {
  let left = position;
  for (let axis = sizes.length - 1; axis >= 0; axis -= 1) {
    if (left % sizes[axis] && !axes.includes(axis)) return false;
    left = Math.floor(left / sizes[axis]);
  }
  return true;
}

/**
 * `2 groups of 4 devices, the first is 0, 2, 4, 6`.
 *
 * @param {number[]} axes
 * @param {Mesh} mesh
 */
function spoken(axes, mesh) {
  const known = axes.filter((axis) => axis in mesh.sizes);
  const size = product(known.map((axis) => mesh.sizes[axis]));
  const ours = Array.from({ length: mesh.count }, (_, at) => at).filter((at) => together(at, mesh.sizes, axes));
  const named = ours
    .slice(0, NAMED)
    .map((at) => mesh.devices[at])
    .join(", ");
  const more = ours.length > NAMED ? `, ${count(ours.length - NAMED)} more` : "";
  const groups = mesh.count / size;
  return groups > 1
    ? `${count(groups)} groups of ${count(size)} devices, the first is ${named}${more}`
    : `all ${count(size)} devices`;
}
