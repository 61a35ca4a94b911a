// The mesh drawn small: a cell per device, filled as far as its memory is.

import { axisClass } from "../shared/axes.js";
import { h, s } from "../shared/dom.js";
import { bytes } from "../shared/format.js";

const LARGE = 64; // devices above which cells are only tinted
const LEVELS = 8; // tints

/** The first axis across and the others down, or the longer way across. */
export function meshGlyph(mesh, memory) {
  const first = mesh.sizes[0] ?? 1;
  const rest = mesh.count / first;
  const turned = mesh.count > LARGE && rest > first;
  const [columns, rows] = turned ? [rest, first] : [first, rest];
  const place = (position) => {
    const [a, b] = [Math.floor(position / rest), position % rest];
    return turned ? [b, a] : [a, b];
  };
  const size = mesh.count <= LARGE ? 13 : Math.max(2, Math.min(8, Math.floor(420 / columns)));
  const gap = size > 4 ? 2 : size > 2 ? 1 : 0;
  const shares = filled(mesh, memory);
  const box = { width: columns * (size + gap), height: rows * (size + gap) };
  const draw = mesh.count <= LARGE ? cells : tints;
  const drawing = s(
    "svg",
    { ...box, role: "img", "aria-label": spoken(mesh, memory) },
    s("title", {}, spoken(mesh, memory)),
    draw(shares, place, size, gap, memory?.groups[0].top ?? null),
  );
  const [across, down] = [axisNames(mesh, 0, 1), axisNames(mesh, 1)];
  return h(
    "span",
    { class: "jsm-glyph" },
    h("span", { class: "jsm-glyph-across" }, turned ? down : across),
    drawing,
    h("span", { class: "jsm-glyph-down" }, turned ? across : down),
  );
}

const axisNames = (mesh, from, to) =>
  mesh.names.slice(from, to).map((name, i) => [
    i ? " \u00d7 " : null,
    h("span", { class: axisClass(from + i) }, `${name} ${mesh.sizes[from + i]}`),
  ]);

/** For each device how full it is: of its limit, else of what the fullest holds; 0 where that is not known. */
function filled(mesh, memory) {
  const peaks = memory?.devices.peak ?? [];
  const most = memory?.limit ?? Math.max(1, ...peaks.map((peak) => peak ?? 0));
  return Array.from({ length: mesh.count }, (_, i) => Math.min(1, (peaks[i] ?? 0) / most));
}

function cells(shares, place, size, gap, fullest) {
  return shares.map((share, position) => {
    const [x, y] = place(position).map((i) => i * (size + gap));
    const height = (size - 2) * share;
    return [
      s("rect", { x: x + 0.5, y: y + 0.5, width: size - 1, height: size - 1, class: "jsm-frame" }),
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

/** One path per tint, so that thousands of devices are as light as eight. */
function tints(shares, place, size, gap, fullest) {
  const paths = Array.from({ length: LEVELS + 1 }, () => []);
  const square = (position) => `M${place(position).map((i) => i * (size + gap)).join(" ")}h${size}v${size}h-${size}z`;
  shares.forEach((share, position) => paths[Math.round(share * LEVELS)].push(square(position)));
  const drawn = paths.map(
    (squares, level) =>
      squares.length > 0 &&
      s("path", { d: squares.join(""), fill: "var(--jsm-ink-3)", opacity: 0.2 + (0.8 * level) / LEVELS }),
  );
  const outline = { fill: "none", stroke: "var(--jsm-ink)", "stroke-width": 1.5 };
  return [drawn, fullest === null ? null : s("path", { d: square(fullest), ...outline })];
}

function spoken(mesh, memory) {
  const axes = mesh.names.map((name, i) => `${name} ${mesh.sizes[i]}`).join(" by ");
  const said = `${mesh.count} device${mesh.count === 1 ? "" : "s"}: ${axes}`;
  const top = memory?.groups[0].top ?? null;
  const peak = top === null ? null : memory.devices.peak[top];
  if (peak === null) return said;
  const of = memory.limit === null ? "" : ` of ${bytes(memory.limit)}`;
  const filled = memory.limit === null ? "share of the fullest" : "share of the memory limit";
  const which = memory.groups.length > 1 ? `; device ${mesh.devices[top]} is fullest, ${bytes(peak)}${of}` : "";
  return `${said}, each filled to its ${filled}${which}`;
}
