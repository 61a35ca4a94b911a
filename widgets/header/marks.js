// The small drawings under the key figures. They repeat what the note says, so screen readers skip them.

import { hue } from "../shared/axes.js";
import { s } from "../shared/dom.js";

/** @import * as Sent from "../shared/payload_types.js" */

const HEIGHT = 6;
const LEAST = 1.5; // px of what is there at all
const MARGIN = 0.12; // of a range's width, left free on both sides

/**
 * The drawing of a payload's mark; nothing for none.
 *
 * @param {Sent.Mark | null} given
 */
export const mark = (given) =>
  given && s("svg", { class: "jsm-figure-mark", width: "100%", height: HEIGHT, "aria-hidden": "true" }, drawing(given));

/** @param {Sent.Mark} given */
function drawing(given) {
  if (given.kind === "range") return range(given);
  if (given.kind === "share") return share(given);
  if (given.kind === "axes") return axes(given);
  if (given.kind === "limit") return limit(given);
  throw new Error(`no drawing of ${/** @type {never} */ (given)}`);
}

/** @param {number} x */
const percent = (x) => `${(100 * x).toFixed(2)}%`;

/**
 * @param {number} x
 * @param {number} width
 * @param {string} fill
 * @param {number} [opacity]
 */
const bar = (x, width, fill, opacity) => {
  const style = { x: `min(${percent(x)}, calc(100% - ${LEAST}px))`, width: `max(${LEAST}px, ${percent(width)})` };
  return s("rect", { height: HEIGHT, fill, opacity, style });
};

/** @param {string} stroke */
const rule = (stroke) => s("line", { x1: 0, x2: "100%", y1: 3, y2: 3, stroke });

/**
 * Least to most of the measured steps, the median as a dot, the prediction as a hollow one.
 *
 * @param {Sent.RangeMark} given
 */
function range({ min, median, max, predicted }) {
  const all = [min, max, predicted ?? median];
  const low = Math.min(...all);
  const wide = Math.max(...all) - low;
  const at = (/** @type {number} */ value) => percent(wide ? MARGIN + (1 - 2 * MARGIN) * ((value - low) / wide) : 0.5);
  return [
    rule("var(--jsm-line)"),
    s("line", { x1: at(min), x2: at(max), y1: 3, y2: 3, stroke: "var(--jsm-ink-3)", "stroke-width": 3 }),
    s("circle", { cx: at(median), cy: 3, r: 3, fill: "var(--jsm-ink)" }),
    predicted === null
      ? null
      : s("circle", {
          cx: at(predicted),
          cy: 3,
          r: 2.5,
          fill: "var(--jsm-bg)",
          stroke: "var(--jsm-ink)",
          "stroke-width": 1.2,
        }),
  ];
}

/**
 * How much of the limit is used; what is above it in the colour of errors.
 *
 * @param {Sent.ShareMark} mark
 */
function share({ share }) {
  const over = Math.max(0, share - 1);
  const scale = 1 / Math.max(1, share);
  return [
    bar(0, 1, "var(--jsm-fill-2)"),
    bar(0, Math.min(share, 1) * scale, "var(--jsm-ink-3)"),
    over ? bar(scale, over * scale, "var(--jsm-error)") : null,
  ];
}

/**
 * What is sent over each set of axes, in the hue of its first.
 *
 * @param {Sent.AxesMark} mark
 */
function axes({ parts }) {
  let x = 0;
  return parts.map(([axis, width]) => {
    const made = bar(x, width, axis === null ? "var(--jsm-ink-3)" : hue(axis));
    x += width;
    return made;
  });
}

/**
 * Where a difference lies on a logarithmic scale that ends a hundredfold above its limit.
 *
 * @param {Sent.LimitMark} mark
 */
function limit({ value, limit, ok }) {
  const [low, high] = [Math.log10(limit) - 4, Math.log10(limit) + 2];
  const at = (/** @type {number} */ x) =>
    percent(Math.min(0.98, Math.max(0.02, x > 0 ? (Math.log10(x) - low) / (high - low) : 0)));
  return [
    rule("var(--jsm-line-2)"),
    s("line", { x1: at(limit), x2: at(limit), y1: 0, y2: HEIGHT, stroke: "var(--jsm-ink-2)", "stroke-width": 1.5 }),
    s("circle", { cx: at(value), cy: 3, r: 3, fill: ok ? "var(--jsm-ok)" : "var(--jsm-error)" }),
  ];
}
