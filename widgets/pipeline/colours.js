// The page's colours and type as a canvas takes them.

import { KINDS } from "./events.js";

const NAMES = /** @type {const} */ (["bg", "ink", "ink-2", "ink-3", "line", "fill-2", "hatch", "focus"]);

/** @typedef {ReturnType<typeof palette>} Palette */

/**
 * The colours of `root` by name, `kinds` and `on` by kind, `bytes` of them as [r, g, b], and the font's families.
 *
 * @param {Element} root
 */
export function palette(root) {
  const style = getComputedStyle(root);
  const value = (/** @type {string} */ name) => style.getPropertyValue(`--jsm-${name}`).trim();
  const found = /** @type {Record<typeof NAMES[number], string>} */ (
    Object.fromEntries(NAMES.map((name) => [name, value(name)]))
  );
  const kinds = [...KINDS].map(value);
  const over = painter(found.bg);
  return {
    ...found,
    kinds,
    on: [...KINDS].map((kind) => value(`on-${kind}`)),
    bytes: { bg: over(found.bg), hatch: over(found.hatch), kinds: kinds.map(over) },
    font: style.fontFamily,
  };
}

/**
 * The context of a canvas to draw in: every browser has the one of two dimensions.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasRenderingContext2DSettings} [settings]
 */
export const brush = (canvas, settings) => /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", settings));

/**
 * What any CSS colour is on the ground `bg`, as bytes.
 *
 * @param {string} bg
 */
function painter(bg) {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = brush(canvas, { willReadFrequently: true });
  return (/** @type {string} */ colour) => {
    for (const each of ["#fff", bg, colour]) {
      context.fillStyle = each;
      context.fillRect(0, 0, 1, 1);
    }
    return [...context.getImageData(0, 0, 1, 1).data.subarray(0, 3)];
  };
}

const HATCH = 4; // px between two lines

/**
 * The bubbles' hatch as a pattern for a canvas with `ratio` device pixels to a pixel.
 *
 * @param {CanvasRenderingContext2D} context
 * @param {string} colour
 * @param {number} ratio
 */
export function hatch(context, colour, ratio) {
  const size = Math.round(HATCH * ratio);
  const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
  const drawn = brush(tile);
  drawn.strokeStyle = colour;
  drawn.lineWidth = Math.max(1, 0.8 * ratio);
  for (const by of [-size, 0, size]) {
    drawn.moveTo(by - 1, size + 1);
    drawn.lineTo(by + size + 1, -1);
  }
  drawn.stroke();
  const pattern = /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat"));
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
