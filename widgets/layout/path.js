// A leaf's path as nodes that shrink in order: the parts that tell least give way first.

import { h } from "../shared/dom.js";
import { hits } from "./search.js";

/** @import { Row } from "./rows.js" */

const VARYING = /\d+(?:-\d+)?(?:,(?:\d+(?:-\d+)?|\u2026))+|\d+-\d+/g;

/**
 * Three boxes: first the parts that the row above has too, which are quiet (of a family, what leads up to the
 * numbers that vary, which stand as a chip, `0–47`); last the last two parts. What the filter found is marked.
 *
 * @param {Row} row
 * @param {string[]} words
 */
export function pathNodes({ path, kind, shared }, words) {
  const starts = [0, ...[...path.matchAll(/\./g)].map(({ index }) => index + 1)];
  const varying =
    kind === "family" ? [...path.matchAll(VARYING)].map((match) => [match.index, match.index + match[0].length]) : [];
  const tail = starts.at(-2) ?? 0;
  const quiet = starts[shared];
  const middle = Math.min(tail, varying.length ? (starts.findLast((start) => start <= varying[0][0]) ?? 0) : quiet);
  const found = hits(path, words);
  const cuts = new Set([0, middle, tail, quiet, ...varying.flat(), path.length]);
  for (let i = 1; i < path.length; i += 1) if (found[i] !== found[i - 1]) cuts.add(i);
  const ends = [...cuts].sort((a, b) => a - b);
  /** @type {Record<"head" | "middle" | "tail", (HTMLElement | string)[]>} */
  const boxes = { head: [], middle: [], tail: [] };
  ends.slice(0, -1).forEach((from, i) => {
    const chip = varying.some(([start, end]) => start <= from && from < end);
    const text = path.slice(from, ends[i + 1]);
    const piece = found[from] ? h("mark", {}, text) : text;
    const style = chip ? "jsm-chip" : from < quiet ? "jsm-quieter" : null;
    const box = from < middle ? "head" : from < tail ? "middle" : "tail";
    boxes[box].push(style ? h("span", { class: style }, chip ? text.replaceAll("-", "\u2013") : piece) : piece);
  });
  const filled = Object.entries(boxes).filter(([, nodes]) => nodes.length);
  return filled.map(([name, nodes]) => h("span", { class: `jsm-path-${name}` }, nodes));
}
