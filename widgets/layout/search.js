// What the filter finds: every word of it must stand in a leaf's path, type, role or state.

import { h } from "../shared/dom.js";
import { withinOf } from "../shared/mesh.js";

/** @import { Mesh } from "../shared/mesh.js" */
/** @import { LeafList } from "./rows.js" */

/**
 * `find(query)` gives the set of leaves that match, null for an empty query.
 *
 * @param {LeafList} data
 * @param {Mesh} mesh
 */
export function searcher(data, mesh) {
  const failed = new Set(data.failed);
  /** @type {string[] | undefined} */
  let texts;

  const text = (/** @type {number} */ leaf) => {
    const { path, role, dtype, shape, spec } = data.leaves;
    const dims = shape[leaf].map((size, i) => `${size}${axes(spec[leaf][i] ?? [])}`);
    const states = [leaf in data.short ? "warn" : "", failed.has(leaf) ? "differs" : ""];
    return [path[leaf], `${dtype[leaf]}[${dims.join(",")}]`, role[leaf], ...placesOf(leaf), ...states]
      .join(" ")
      .toLowerCase();
  };
  const placesOf = (/** @type {number} */ leaf) =>
    withinOf(data, leaf).flatMap(([axis, first, end]) =>
      Array.from({ length: end - first }, (_, i) => `${mesh.names[axis]}=${first + i}`),
    );
  const axes = (/** @type {number[]} */ indices) => indices.map((index) => `@${mesh.names[index]}`).join("");

  return (/** @type {string} */ query) => {
    const words = wordsOf(query);
    if (!words.length) return null;
    texts ??= data.leaves.path.map((_, leaf) => text(leaf));
    return new Set(texts.flatMap((each, leaf) => (words.every((word) => each.includes(word)) ? [leaf] : [])));
  };
}

/** @param {string} query */
export const wordsOf = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

/**
 * For each letter of `text` whether a word of the query stands there.
 *
 * @param {string} text
 * @param {string[]} words
 */
export function hits(text, words) {
  const found = new Uint8Array(text.length);
  const lower = text.toLowerCase();
  for (const word of words) {
    for (let at = lower.indexOf(word); at >= 0; at = lower.indexOf(word, at + 1)) found.fill(1, at, at + word.length);
  }
  return found;
}

/**
 * `node` with the words of the query marked in its text, across the elements in it.
 *
 * @template {Element} Marked
 * @param {Marked} node
 * @param {string[]} words
 */
export function marked(node, words) {
  const found = hits(node.textContent, words);
  if (!found.includes(1)) return node;
  const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
  /** @type {Text[]} */
  const all = [];
  while (texts.nextNode()) all.push(/** @type {Text} */ (texts.currentNode));
  let at = 0;
  for (const text of all) {
    /** @type {{ hit: boolean, text: string }[]} */
    const pieces = [];
    for (const letter of text.data) {
      const hit = found[at] === 1;
      const last = pieces.at(-1);
      if (last?.hit === hit) last.text += letter;
      else pieces.push({ hit, text: letter });
      at += letter.length;
    }
    text.replaceWith(...pieces.map((piece) => (piece.hit ? h("mark", {}, piece.text) : piece.text)));
  }
  return node;
}
