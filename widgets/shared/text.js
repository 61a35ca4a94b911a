// Pieces of text that all views share: sentences from the kernel, types, specs, signs, lines to copy.

import { axisClass } from "./axes.js";
import { h, s } from "./dom.js";
import { bytesParts } from "./format.js";

/** @import * as Sent from "./payload_types.js" */
/** @import { Figure } from "./format.js" */
/** @import { AxisNames, Leaf } from "./mesh.js" */

/**
 * The name of a mesh axis in its hue.
 *
 * @param {AxisNames} mesh
 * @param {number} index
 */
export const axis = (mesh, index) => h("span", { class: axisClass(index) }, mesh.names[index]);

/**
 * A sentence as nodes; `opens` tells what a span of kind "memory" or "line" does: `opens.line("cell [3], line 12")` is
 * a function that goes there, null where there is nothing to go to.
 *
 * @param {Sent.Span[]} list
 * @param {AxisNames} mesh
 * @param {Record<string, (text: string) => (() => void) | null>} [opens]
 */
export function spans(list, mesh, opens = {}) {
  return list.map(([text, kind]) => {
    if (kind === "strong") return h("b", {}, text);
    if (kind === "code") return h("code", { class: "jsm-mono" }, text);
    if (kind === "axis") {
      const index = mesh.names.indexOf(text);
      return h("b", { class: index < 0 ? null : axisClass(index) }, text);
    }
    const go = opens[kind]?.(text);
    return go ? h("button", { type: "button", class: "jsm-link", onclick: go }, text) : text;
  });
}

/**
 * `f32[50257,768@data]`: JAX's notation, each axis in its hue.
 *
 * @param {AxisNames} mesh
 * @param {Pick<Leaf, "shape" | "spec" | "dtype">} leaf
 */
export function typed(mesh, leaf) {
  const dims = leaf.shape.map((size, i) => {
    const axes = leaf.spec[i];
    const names = axes.flatMap((index, j) => [j ? "," : null, axis(mesh, index)]);
    const at = axes.length ? h("span", { class: "jsm-quieter" }, axes.length > 1 ? "@(" : "@") : null;
    return [i ? "," : null, size, at, names, axes.length > 1 ? h("span", { class: "jsm-quieter" }, ")") : null];
  });
  return h("span", { class: "jsm-mono jsm-type" }, leaf.dtype, "[", dims, "]");
}

/**
 * `on pipe=2`: where leaves lie that are not on the whole mesh, given the `within` of each; `on one of pipe=0-3` for
 * leaves of a stage each; `short`, `pipe=0-3`. Nothing for the whole mesh.
 *
 * @param {AxisNames} mesh
 * @param {Sent.Within[][]} withins
 */
export function placed(mesh, withins, short = false) {
  if (!withins[0].length) return null;
  const parts = withins[0].map(([index], i) => {
    const spans = new Map(withins.map((within) => [within[i].join(), within[i].slice(1)]));
    const [[first, end]] = spans.values();
    const oneOf = short || spans.size === 1 ? null : `${end - first === 1 ? "one" : end - first} of `;
    return [i ? ", " : null, oneOf, axis(mesh, index), `=${indexText([...spans.values()])}`];
  });
  return h("span", { class: "jsm-place" }, short ? null : "on ", parts);
}

/**
 * `0-3,8`: the indices in `spans`, each `[first, end]`; of many runs the first and the last.
 *
 * @param {number[][]} spans
 */
function indexText(spans) {
  /** @type {number[][]} */
  const runs = [];
  for (const [first, end] of spans.toSorted(([a], [b]) => a - b)) {
    const last = runs.at(-1);
    if (last && first <= last[1]) last[1] = Math.max(end, last[1]);
    else runs.push([first, end]);
  }
  const texts = runs.map(([first, end]) => (end - first === 1 ? `${first}` : `${first}-${end - 1}`));
  return texts.length > 3 ? `${texts[0]},\u2026,${texts.at(-1)}` : texts.join(",");
}

/**
 * `P(None, 'model')`, without the Nones at its end.
 *
 * @param {AxisNames} mesh
 * @param {Pick<Leaf, "spec">} leaf
 */
export function specText(mesh, leaf) {
  const entries = leaf.spec.map((axes) => {
    const names = axes.map((index) => `'${mesh.names[index]}'`);
    return names.length > 1 ? `(${names.join(", ")})` : (names[0] ?? "None");
  });
  while (entries.at(-1) === "None") entries.pop();
  return `P(${entries.join(", ")})`;
}

/**
 * Bytes as a number and a quieter unit.
 *
 * @param {Figure} n
 */
export function bytesNodes(n) {
  const [number, unit] = bytesParts(n);
  return unit ? [number, h("span", { class: "jsm-u" }, unit)] : [number];
}

const SHAPES = {
  ok: () => [s("path", { d: "M1.8 7.2 5 10.4 11.4 2.8", "stroke-width": 1.8 })],
  error: () => [s("path", { d: "M2.4 2.4 10.6 10.6M10.6 2.4 2.4 10.6", "stroke-width": 1.8 })],
  warning: () => [
    s("path", { d: "M6.5 1 12.4 12H.6Z", "stroke-width": 1.3, "stroke-linejoin": "round" }),
    s("path", { d: "M6.5 5v3.2M6.5 9.4v1.2", "stroke-width": 1.3 }),
  ],
  info: () => [
    s("circle", { cx: 6.5, cy: 6.5, r: 5.6, "stroke-width": 1.3 }),
    s("path", { d: "M6.5 5.6v4M6.5 3.2v1.3", "stroke-width": 1.4 }),
  ],
};

/**
 * A sign whose shape tells what its colour tells: ok, error, warning, info. `label` is read aloud, null is not.
 *
 * @param {Sent.Sign} kind
 * @param {string | null} [label]
 */
export const sign = (kind, label = kind) =>
  h(
    "span",
    {
      class: `jsm-sign jsm-${kind}`,
      ...(label === null ? { "aria-hidden": "true" } : { role: "img", "aria-label": label }),
    },
    s("svg", { viewBox: "0 0 13 13", fill: "none", stroke: "currentColor", "aria-hidden": "true" }, SHAPES[kind]()),
  );

const SAID_FOR = 1200; // ms that the button says "copied"

/**
 * A line of code beside a button that copies it.
 *
 * @param {string} text
 */
export function copyable(text) {
  const words = text.split(" ").flatMap((word, i) => [i ? " " : null, h("span", { class: "jsm-word" }, word)]);
  const button = h("button", { type: "button", "aria-label": `Copy ${text}` }, "copy");
  button.addEventListener("click", async () => {
    button.textContent = (await toClipboard(text, button)) ? "copied" : "press Ctrl+C";
    setTimeout(() => (button.textContent = "copy"), SAID_FOR);
  });
  return h("span", { class: "jsm-copy" }, h("code", {}, words), button);
}

/**
 * Whether `text` got there: a page without the clipboard's permission selects it for Ctrl+C instead.
 *
 * @param {string} text
 * @param {HTMLElement} button
 */
async function toClipboard(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection()?.selectAllChildren(/** @type {Node} */ (button.previousSibling));
    return false;
  }
}
