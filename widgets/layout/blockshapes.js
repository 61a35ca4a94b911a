// The parts of an array's picture: its ground, sheets, cut lines, offsets and the numbers of the devices.

import { dash, hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";
import { cutLines, isCount, listed, offsets } from "./plan.js";

/** @import { Frame, Framed, Side } from "./frames.js" */
/** @import { Arranged } from "./plan.js" */
/** @import { Leaf } from "../shared/mesh.js" */

const LINE = 13; // px between lines of numbers
const SPARSE = 6; // px between cuts from which on they are drawn sharp and stand out of the frame
const WIDEST = 1.75; // px of a cut line

/**
 * The share of a frame's length at which piece `i` begins; of a frame without that dimension it has one piece.
 *
 * @param {Side | null} part
 * @param {number} i
 */
const edge = (part, i) => part?.edges[i] ?? i;

/**
 * The least and the greatest x or y of piece `i`.
 *
 * @type {(part: Side | null, i: number, start: number, length: number) => number[]}
 */
const span = (part, i, start, length) => [start + edge(part, i) * length, start + edge(part, i + 1) * length];

/**
 * The rectangle of a block: `{x, y, width, height}`.
 *
 * @param {Framed} picture
 * @param {Frame} frame
 * @param {number} down
 * @param {number} across
 */
export function blockBox({ dims, w, h }, frame, down, across) {
  const [left, right] = span(dims.column, across, frame.x, w).map((x) => sharp(x, dims.column, w));
  const [top, bottom] = span(dims.row, down, frame.y, h).map((y) => sharp(y, dims.row, h));
  return { x: left, y: top, width: right - left, height: bottom - top };
}

/**
 * @param {number} at
 * @param {Side | null} part
 * @param {number} length
 */
const sharp = (at, part, length) => (part && length / part.pieces < SPARSE ? at : Math.round(at));

/** @param {Framed} picture */
export const ground = ({ frames, w, h }) =>
  frames.map(({ x, y }) => s("rect", { class: "jsm-ground", x, y, width: w, height: h }));

/** @param {Framed} picture */
export const outlines = ({ frames, w, h }) =>
  frames.map(({ x, y }) => s("rect", { class: "jsm-frame", x: x + 0.5, y: y + 0.5, width: w, height: h }));

/**
 * The edges of the sheets behind each frame, and what they stand for.
 *
 * @param {Leaf} leaf
 * @param {Framed} picture
 */
export function sheets(leaf, { plan, frames, w, h, sheets: { count, right, up }, titled }) {
  if (!count) return [];
  const each = (/** @type {Frame} */ { x, y }) =>
    Array.from({ length: count }, (_, i) => {
      const [dx, dy] = [(i + 1) * right + 0.5, 0.5 - (i + 1) * up];
      return `M${x + dx} ${y + dy + up - 1}V${y + dy}H${x + w + dx}V${y + h + dy}h${1 - right}`;
    });
  const edge = Math.max(...frames.map(({ x }) => x)) + w + count * right;
  const sizes = plan.whole.map((dim) => leaf.shape[dim]);
  const words = `× ${sizes.join(" × ")} whole`;
  const fits = words.length * 6.1 < edge;
  return [
    s("path", { class: "jsm-sheets", d: frames.flatMap(each).join("") }),
    s(
      "text",
      { class: "jsm-mark jsm-mono", x: edge, y: frames[0].y - count * up - 4 - titled, "text-anchor": "end" },
      fits ? words : `× ${sizes.length} whole dimensions`,
    ),
  ];
}

/**
 * One path for each axis that cuts the columns or the rows, in all frames.
 *
 * @param {Leaf} leaf
 * @param {Framed} picture
 */
export function cuttingLines(leaf, { dims, frames, w, h }) {
  const draw = (
    /** @type {Side | null} */ part,
    /** @type {number} */ length,
    /** @type {(frame: Frame, at: number, out: number) => string} */ path,
  ) =>
    cutLines(leaf, part ? leaf.spec[part.dim] : []).map(({ axis, pieces, at }) => {
      const apart = length / pieces;
      const out = apart >= SPARSE ? 5 : 0;
      const lines = frames.flatMap((f) => at.map((i) => path(f, sharpLine(edge(part, i) * length, apart), out)));
      const thin = apart / (apart < 2 ? 8 : 4); // dense ones make a tint
      const width = Math.min(WIDEST, Math.max(0.02, thin));
      return s("path", {
        d: lines.join(""),
        stroke: hue(axis),
        "stroke-width": width,
        "stroke-dasharray": dash(axis),
        fill: "none",
      });
    });
  return [
    ...draw(dims.column, w, (f, at, out) => `M${f.x + at} ${f.y}v${h + out}`),
    ...draw(dims.row, h, (f, at, out) => `M${f.x - out} ${f.y + at}h${w + out}`),
  ];
}

/**
 * @param {number} at
 * @param {number} apart
 */
const sharpLine = (at, apart) => (apart < SPARSE ? at : Math.round(at) + 0.5);

/**
 * The offsets at the cuts, below the lowest frames and left of the leftmost.
 *
 * @param {Framed} picture
 */
export function offsetTexts({ dims, frames, w, h, ticks }) {
  const text = (
    /** @type {number} */ x,
    /** @type {number} */ y,
    /** @type {string} */ anchor,
    /** @type {string} */ words,
  ) => s("text", { class: "jsm-offset jsm-mono", x, y, "text-anchor": anchor }, words);
  const below = (/** @type {Frame} */ f) =>
    ticks.column.map(([i, words]) => {
      const anchor = i === 0 ? "start" : i === dims.column?.pieces ? "end" : "middle";
      return text(f.x + edge(dims.column, i) * w, f.y + h + 13, anchor, words);
    });
  const beside = (/** @type {Frame} */ f) =>
    ticks.row.map(([i, words]) => text(f.x - 8, f.y + edge(dims.row, i) * h + (i ? 3.5 : 8), "end", words));
  return frames.flatMap((f) => [f.outer.bottom ? below(f) : [], f.outer.left ? beside(f) : []]);
}

/**
 * What of the array a panel holds: `dim 0 = 12:16`.
 *
 * @param {Leaf} leaf
 * @param {Arranged} plan
 * @param {number[]} block
 */
export function panelText(leaf, { panels, pieces }, block) {
  return panels.map((dim) => {
    const at = offsets(leaf.shape[dim], pieces[dim]);
    return `dim ${dim} = ${at[block[dim]]}:${at[block[dim] + 1]}`;
  });
}

/**
 * The texts above small panels; without the dimensions' names where those don't fit.
 *
 * @param {Framed} picture
 * @param {string[][]} words
 */
export function titles({ frames, w, sheets: { count, up } }, words) {
  const short = words.some((parts) => parts.join(", ").length * 6.1 > w);
  return frames.map((f, i) => {
    const parts = short ? words[i].map((part) => part.replace(/^.*= /, "")) : words[i];
    return s("text", { class: "jsm-mark jsm-mono", x: f.x, y: f.y - count * up - 4 }, parts.join(", "));
  });
}

/**
 * The ids of a block's holders in its middle, `bold` among them the one that is shown; null if none fit.
 *
 * @param {string[]} ids
 * @param {{ x: number, y: number, width: number, height: number }} box
 * @param {string | null} [bold]
 */
export function holderText(ids, box, bold = null) {
  const lines = listed(ids, box.width, box.height);
  if (!lines) return null;
  const x = box.x + box.width / 2;
  const y = box.y + box.height / 2 + 4 - ((lines.length - 1) * LINE) / 2;
  const shown = (/** @type {string} */ id) => bold === null || id === bold || isCount(id);
  return s(
    "text",
    {
      class: `jsm-mark jsm-mono ${bold === null ? "jsm-ink" : "jsm-detail-on-shown"}`,
      "text-anchor": "middle",
    },
    lines.map((line, i) =>
      line.map((id, j) =>
        s(
          "tspan",
          { ...(j ? {} : { x, y: y + i * LINE }), class: shown(id) ? null : "jsm-detail-also" },
          j ? ` ${id}` : id,
        ),
      ),
    ),
  );
}
