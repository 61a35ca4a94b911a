// What a check found beyond its figure: leaves that differ, and those that only rounding moves.

import { h } from "../shared/dom.js";
import { count } from "../shared/format.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Selection } from "../shared/selection.js" */

/**
 * A line for each sentence of `lines` that names leaves, at most `most` of them; each opens its leaf. A leaf is its
 * path and by how much or where it differs; an earlier version saved both as one text.
 *
 * @param {Sent.Check["lines"] | undefined} lines
 * @param {number} most
 * @param {Sent.Report} data
 * @param {Selection} selection
 */
export function named(lines, most, data, selection) {
  const find = found(data);
  const about = (lines ?? []).filter(([, leaves]) => leaves.length);
  return about.map(([sentence, leaves]) => {
    const told = leaves
      .slice(0, most)
      .map((told) => (Array.isArray(told) ? told : [told, ""]))
      .flatMap(([path, much], i) => [i ? ", " : " ", leaf(path, find(path), selection), much ? ` ${much}` : null]);
    const more = leaves.length > most ? ` and ${count(leaves.length - most)} more` : null;
    return h("p", { class: "jsm-small jsm-quiet" }, sentence, told, more);
  });
}

/**
 * Which leaf a path of the check means, among those that the payload says it speaks of. A check names the step's
 * outputs, `params.w`: the leaf `state.params.w` or `w` that the step takes is the same one.
 *
 * @param {Sent.Report} data
 */
function found({ failed, noise, leaves }) {
  const index = new Map();
  for (const key of [inner, (/** @type {string} */ path) => path]) {
    for (const i of [...failed, ...noise].reverse()) index.set(key(leaves.path[i]), i);
  }
  return (/** @type {string} */ path) => index.get(path) ?? index.get(inner(path)) ?? null;
}

/** @param {string} path */
const inner = (path) => path.slice(path.indexOf(".") + 1) || path;

/**
 * @param {string} path
 * @param {number | null} index
 * @param {Selection} selection
 */
function leaf(path, index, selection) {
  if (index === null) return h("code", {}, path);
  const open = () => selection.select({ tab: "layout", leaf: index });
  return h("button", { type: "button", class: "jsm-link", onclick: open }, h("code", {}, path));
}
