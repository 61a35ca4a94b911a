// The mesh drawn small: a cell per device, filled as far as its memory is where that has a limit, else an outline; many
// devices are a map of tints.

import { axisClass } from "../shared/axes.js";
import { h, s } from "../shared/dom.js";
import { bytes, counted } from "../shared/format.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @typedef {ReturnType<typeof planned>} Planned */

const LARGE = 64; // devices above which cells are only tinted
const TINTS = 24;
const DOWN = 4; // devices that may stand below each other though more of them than across
const [WIDTH, HEIGHT] = [384, 64]; // px for all cells
const PITCH = { most: 15, fair: 10, least: 2 }; // px from cell to cell
const LEAST = 1; // px of what a device holds
const APART = 3; // px of the smallest cells between which a line is seen
const BAND = 4; // px more between the bands of a broken axis

/**
 * The first axis across and the others down, the longer way across where that would be a tower.
 *
 * @param {Mesh} mesh
 * @param {Sent.Memory | null} memory
 */
export function meshGlyph(mesh, memory) {
  const plan = planned(mesh);
  const shares = filled(mesh, memory);
  const told = spoken(mesh, memory, plan);
  const fullest = memory && memory.groups.length > 1 ? memory.groups[0].top : null;
  const drawing = s(
    "svg",
    { ...plan.box, viewBox: `0 0 ${plan.box.width} ${plan.box.height}`, role: "img", "aria-label": told },
    s("title", {}, told),
    plan.filled ? cells(shares, plan, fullest) : tints(shares, plan, fullest),
    mesh.hosts.length > 0 && plan.size >= APART && s("path", { class: "jsm-glyph-hosts", d: hostLines(mesh, plan) }),
  );
  const names = [axisNames(mesh, 0, 1), axisNames(mesh, 1, mesh.names.length)];
  const [across, down] = plan.turned ? names.reverse() : names;
  return h(
    "span",
    { class: "jsm-glyph" },
    h("span", { class: "jsm-glyph-across" }, across),
    drawing,
    h("span", { class: "jsm-glyph-down" }, down),
    plan.filled || fullest === null
      ? null
      : h("span", { class: "jsm-glyph-fullest jsm-quiet" }, `device ${mesh.devices[fullest]} is fullest`),
  );
}

/**
 * The axes of more than one device with their sizes; of a single device the first.
 *
 * @param {Mesh} mesh
 * @param {number} from
 * @param {number} to
 */
function axisNames(mesh, from, to) {
  const axes = mesh.names.map((_, axis) => axis).slice(from, to);
  const shown = axes.filter((axis) => mesh.sizes[axis] > 1 || (mesh.count === 1 && axis === 0));
  return shown.map((axis, i) => [
    i ? " \u00d7 " : null,
    h("span", { class: axisClass(axis) }, `${mesh.names[axis]} ${mesh.sizes[axis]}`),
  ]);
}

/**
 * Where each device's cell lies: `at(position)` is its corner, `next(position)` its neighbours, `size` its side, `gap`
 * what is between two, `box` what all take, `filled` whether cells are large and few enough to be filled. A way across
 * that is too long is broken into bands.
 *
 * @param {Mesh} mesh
 */
function planned(mesh) {
  const first = mesh.sizes[0] ?? 1;
  const rest = mesh.count / first;
  const turned = rest > first && rest > DOWN;
  const [columns, rows] = turned ? [rest, first] : [first, rest];
  const bands = broken(columns, rows);
  const across = columns / bands;
  const pitch = Math.max(PITCH.least, Math.floor(room(columns, rows, bands)));
  const gap = pitch > 7 ? 2 : pitch > 2 ? 1 : 0;
  const height = rows * pitch + (rows > 1 ? BAND : 0);
  const filled = mesh.count <= LARGE && pitch >= PITCH.fair;
  const at = (/** @type {Sent.Position} */ position) => {
    const [outer, inner] = [Math.floor(position / rest), position % rest];
    const [column, row] = turned ? [inner, outer] : [outer, inner];
    return [(column % across) * pitch, Math.floor(column / across) * height + row * pitch];
  };
  const next = (/** @type {Sent.Position} */ position) => {
    const [outer, inner] = [Math.floor(position / rest), position % rest];
    const right = turned ? [outer, inner + 1] : [outer + 1, inner];
    const below = turned ? [outer + 1, inner] : [outer, inner + 1];
    const there = (/** @type {number[]} */ [o, i]) => (o < first && i < rest ? o * rest + i : null);
    const ends = ((turned ? inner : outer) + 1) % across === 0; // of a band
    return { right: ends ? null : there(right), below: there(below) };
  };
  const box = { width: across * pitch, height: (bands - 1) * height + rows * pitch };
  return { turned, filled, size: pitch - gap, gap, box, at, next };
}

/**
 * @param {number} columns
 * @param {number} rows
 * @param {number} bands
 */
const room = (columns, rows, bands) => Math.min(PITCH.most, (WIDTH * bands) / columns, HEIGHT / (rows * bands));

/**
 * Into how many bands: the fewest whose cells are of a fair size, else those with the largest cells.
 *
 * @param {number} columns
 * @param {number} rows
 */
function broken(columns, rows) {
  const pitch = (/** @type {number} */ bands) => room(columns, rows, bands);
  const ways = Array.from({ length: columns }, (_, i) => i + 1).filter((bands) => columns % bands === 0);
  return ways.find((bands) => pitch(bands) >= PITCH.fair) ?? ways.reduce((a, b) => (pitch(b) > pitch(a) ? b : a));
}

/**
 * For each device how much of its limit it takes; 0 where that is not known, or there is no limit.
 *
 * @param {Mesh} mesh
 * @param {Sent.Memory | null} memory
 */
function filled(mesh, memory) {
  const limit = memory?.limit ?? Infinity;
  return Array.from({ length: mesh.count }, (_, i) => Math.min(1, (memory?.devices.peak[i] ?? 0) / limit));
}

/**
 * @param {number[]} shares
 * @param {Planned} plan
 * @param {Sent.Position | null} fullest
 */
function cells(shares, { at, size }, fullest) {
  return shares.map((share, position) => {
    const [x, y] = at(position);
    const height = share > 0 ? Math.max(LEAST, (size - 2) * share) : 0;
    const frame = position === fullest ? "jsm-frame jsm-glyph-full" : "jsm-frame";
    return [
      s("rect", { x: x + 0.5, y: y + 0.5, width: size - 1, height: size - 1, class: frame }),
      s("rect", {
        x: x + 1,
        y: y + size - 1 - height,
        width: size - 2,
        height,
        fill: position === fullest ? "var(--jsm-ink)" : "var(--jsm-ink-3)",
      }),
    ];
  });
}

/**
 * Lines between neighbours on different hosts, in the gap between their cells.
 *
 * @param {Mesh} mesh
 * @param {Planned} plan
 */
function hostLines(mesh, { at, next, size, gap }) {
  const lines = mesh.devices.map((_, position) => {
    const [[x, y], { right, below }] = [at(position), next(position)];
    const [beside, under] = [x + size + gap / 2, y + size + gap / 2];
    return [
      right !== null && mesh.apart(position, right) ? `M${beside} ${y - gap / 2}v${size + gap}` : "",
      below !== null && mesh.apart(position, below) ? `M${x - gap / 2} ${under}h${size + gap}` : "",
    ].join("");
  });
  return lines.join("");
}

/**
 * One path per tint, so that thousands of devices are as light as eight.
 *
 * @param {number[]} shares
 * @param {Planned} plan
 * @param {Sent.Position | null} fullest
 */
function tints(shares, { at, size }, fullest) {
  const square = (/** @type {Sent.Position} */ position) => `M${at(position).join(" ")}h${size}v${size}h-${size}z`;
  const paths = Array.from({ length: TINTS + 1 }, () => /** @type {string[]} */ ([]));
  shares.forEach((share, position) => paths[Math.round(share * TINTS)].push(square(position)));
  const drawn = paths.map(
    (squares, level) =>
      squares.length > 0 && s("path", { d: squares.join(""), fill: "var(--jsm-ink-3)", opacity: tint(level / TINTS) }),
  );
  const outline = { fill: "var(--jsm-ink)", stroke: "var(--jsm-ink)", "stroke-width": 1.5 };
  return [drawn, fullest === null ? null : s("path", { d: square(fullest), ...outline })];
}

/**
 * Squared, for the eye tells dark tints apart less well than light ones.
 *
 * @param {number} share
 */
const tint = (share) => 0.15 + 0.85 * share ** 2;

/**
 * @param {Mesh} mesh
 * @param {Sent.Memory | null} memory
 * @param {Planned} plan
 */
function spoken(mesh, memory, plan) {
  const axes = mesh.names.map((name, i) => `${name} ${mesh.sizes[i]}`).join(" by ");
  const hosts = new Set(mesh.hosts).size;
  const said = `${counted(mesh.count, "device")}${hosts ? ` on ${counted(hosts, "host")}` : ""}: ${axes}`;
  const top = memory?.groups[0].top ?? null;
  const peak = memory && top !== null ? memory.devices.peak[top] : null;
  if (!memory || top === null || peak === null) return said;
  const known = memory.limit !== null;
  const drawn = plan.filled ? "each filled to its share of" : "each as dark as its share of";
  const of = known ? ` of ${memory.limit_text}` : "";
  const which = memory.groups.length > 1 ? `; device ${mesh.devices[top]} is fullest, ${bytes(peak)}${of}` : "";
  return `${said}${known ? `, ${drawn} the memory limit` : ""}${which}`;
}
