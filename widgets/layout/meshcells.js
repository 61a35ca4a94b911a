// The shapes of a mesh's cells as path data: one element for all of them, however many there are.

import { s } from "../shared/dom.js";
import { cellOf, deviceIn, offset } from "./meshplan.js";

/** @import { Digit } from "./meshplan.js" */
/** @import { Cell, MeshPlan } from "./meshplan.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/**
 * The upper left corner of a cell.
 *
 * @returns {[x: number, y: number]}
 *
 * @param {MeshPlan} plan
 * @param {number} row
 * @param {number} column
 */
export const corner = ({ x, y, down, across, cw, ch, gap }, row, column) => [
  x + offset(across, column, cw, gap),
  y + offset(down, row, ch, gap),
];

/**
 * @param {number} x
 * @param {number} y
 * @param {number} w
 * @param {number} h
 */
const box = (x, y, w, h) => `M${x} ${y}h${w}v${h}h${-w}z`;

/**
 * The groups of cells without gaps between them: `[x, y, width, height]`.
 *
 * @param {MeshPlan} plan
 */
function groups(plan) {
  const { down, across, rows, columns, cw, ch } = plan;
  const each = (/** @type {Digit[]} */ digits, /** @type {number} */ count) =>
    digits.length > 1 ? digits[digits.length - 1].size : count;
  const [tall, wide] = [each(down, rows), each(across, columns)];
  /** @type {[x: number, y: number, width: number, height: number][]} */
  const found = [];
  for (let row = 0; row < rows; row += tall) {
    for (let column = 0; column < columns; column += wide) {
      found.push([...corner(plan, row, column), wide * cw, tall * ch]);
    }
  }
  return found;
}

/**
 * The area of all cells.
 *
 * @param {MeshPlan} plan
 */
export const ground = (plan) =>
  groups(plan)
    .map((group) => box(...group))
    .join("");

/**
 * The lines around and between them.
 *
 * @param {MeshPlan} plan
 */
export function gridLines(plan) {
  const { cw, ch } = plan;
  return groups(plan)
    .map(([x, y, w, h]) => {
      const lines = [];
      for (let i = 0; i * cw < w + 0.1; i++) lines.push(`M${x + i * cw} ${y}v${h}`);
      for (let i = 0; i * ch < h + 0.1; i++) lines.push(`M${x} ${y + i * ch}h${w}`);
      return lines.join("");
    })
    .join("");
}

/**
 * Lines between neighbours on different hosts.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 */
export function hostLines(mesh, plan) {
  const { cw, ch, rows, columns } = plan;
  const lines = mesh.devices.map((_, position) => {
    const [row, column] = cellOf(mesh, plan, position);
    const apart = (/** @type {number} */ r, /** @type {number} */ c) =>
      r < rows && c < columns && mesh.apart(position, deviceIn(mesh, plan, r, c));
    const [x, y] = corner(plan, row, column);
    const right = apart(row, column + 1) ? (x + cw + corner(plan, row, column + 1)[0]) / 2 : null;
    const below = apart(row + 1, column) ? (y + ch + corner(plan, row + 1, column)[1]) / 2 : null;
    return `${right === null ? "" : `M${right} ${y}v${ch}`}${below === null ? "" : `M${x} ${below}h${cw}`}`;
  });
  return lines.join("");
}

/**
 * The area of some cells, `[row, column]`; neighbours in a row are one rectangle.
 *
 * @param {MeshPlan} plan
 * @param {Cell[]} cells
 */
export function area(plan, cells) {
  const { across, cw, ch } = plan;
  const inner = across.length > 1 ? across[across.length - 1].size : plan.columns;
  /** @type {{ row: number, column: number, count: number }[]} */
  const runs = [];
  for (const [row, column] of cells.toSorted(([r, c], [s, d]) => r - s || c - d)) {
    const last = runs.at(-1);
    const next = last && last.row === row && last.column + last.count === column && column % inner;
    if (next) last.count += 1;
    else runs.push({ row, column, count: 1 });
  }
  return runs.map(({ row, column, count }) => box(...corner(plan, row, column), count * cw, ch)).join("");
}

/**
 * What lies under the numbers of cells so that a hatch does not cross them.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 * @param {Cell[]} cells
 */
export function plates(mesh, plan, cells) {
  const width = Math.min(digits(mesh) * 6 + 5, plan.cw - 4);
  return cells
    .map(([row, column]) => {
      const [x, y] = corner(plan, row, column);
      return box(x + (plan.cw - width) / 2, y + plan.ch / 2 - 6, width, 12);
    })
    .join("");
}

/**
 * The device ids in their cells.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 */
export function numbers(mesh, plan) {
  return mesh.devices.map((id, position) => {
    const [x, y] = corner(plan, ...cellOf(mesh, plan, position));
    const at = { x: x + plan.cw / 2, y: y + plan.ch / 2 + 3.5, "text-anchor": "middle" };
    return s("text", { ...at, class: "jsm-mark jsm-mono jsm-ink", style: numberSize(mesh, plan) }, id);
  });
}

/**
 * Numbers that only just fit are written smaller.
 *
 * @param {Mesh} mesh
 * @param {MeshPlan} plan
 */
export const numberSize = (mesh, { cw }) => (digits(mesh) * 6.1 + 3 > cw ? "font-size:9px" : "");

/** @param {Mesh} mesh */
const digits = (mesh) => String(Math.max(...mesh.devices)).length;

/**
 * Ink stripes: the same slice lies there too.
 *
 * @param {string} id
 * @param {boolean} small
 */
export function hatching(id, small) {
  const [size, width] = small ? [2.5, 1.1] : [5, 2];
  const turned = { patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" };
  return s(
    "pattern",
    { id, width: size, height: size, ...turned },
    s("rect", { class: "jsm-map-plate", width: size, height: size }),
    s("rect", { class: "jsm-map-stripe", width, height: size }),
  );
}
