// How an array is cut, in the size of a letter: cut lines in their axis' hue, a second sheet for copies elsewhere.

import { hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";
import { copies, cuts } from "../shared/mesh.js";

const [COLUMNS, ROWS] = [6, 4]; // pieces drawn at most

/** 28 x 16 px. */
export function glyph(mesh, leaf) {
  return s("svg", { width: 28, height: 16, "aria-hidden": "true" }, leaf.shape.length ? sheet(mesh, leaf) : dot());
}

const dot = () => s("circle", { cx: 13, cy: 8, r: 2.5, fill: "var(--jsm-ink-3)" });

function sheet(mesh, leaf) {
  const copied = copies(mesh, leaf) > 1;
  const box = copied ? { x: 1.5, y: 4.5, width: 21, height: 10 } : { x: 1.5, y: 2.5, width: 23, height: 11 };
  const behind = `M${box.x + 3} ${box.y - 0.5}V${box.y - 3}H${box.x + box.width + 3}V${box.y + box.height - 3}H${box.x + box.width + 0.5}`;
  return [
    copied ? s("path", { d: behind, fill: "none", stroke: "var(--jsm-ink-3)" }) : null,
    s("rect", { ...box, fill: "none", stroke: "var(--jsm-ink-3)" }),
    lines(mesh, leaf, box),
  ];
}

/** The last cut dimension across, the one before it down; one that is cut alone and comes first is drawn down. */
function lines(mesh, leaf, box) {
  const pieces = cuts(mesh, leaf);
  const cut = pieces.flatMap((n, dim) => (n > 1 ? [dim] : []));
  if (!cut.length) return null;
  const last = cut.at(-1);
  if (cut.length === 1 && last === 0 && leaf.shape.length > 1) return down(mesh, leaf, 0, pieces[0], box);
  const before = cut.at(-2);
  return [
    across(mesh, leaf, last, pieces[last], box),
    before === undefined ? null : down(mesh, leaf, before, pieces[before], box),
  ];
}

const across = (mesh, leaf, dim, n, box) =>
  cutsOf(mesh, leaf.spec[dim], Math.min(n, COLUMNS)).map(([at, axis]) =>
    line(`M${box.x + box.width * at} ${box.y}v${box.height}`, axis),
  );

const down = (mesh, leaf, dim, n, box) =>
  cutsOf(mesh, leaf.spec[dim], Math.min(n, ROWS)).map(([at, axis]) =>
    line(`M${box.x} ${box.y + box.height * at}h${box.width}`, axis),
  );

const line = (d, axis) => s("path", { d, stroke: hue(axis), "stroke-width": 1.4 });

/** Where `n` pieces are cut, as [fraction, axis]: the major axis cuts into its share of them, the minor the rest. */
function cutsOf(mesh, axes, n) {
  const inner = Math.max(1, Math.round(n / Math.min(n, mesh.sizes[axes[0]])));
  return Array.from({ length: n - 1 }, (_, i) => [(i + 1) / n, axes.length > 1 && (i + 1) % inner ? axes[1] : axes[0]]);
}
