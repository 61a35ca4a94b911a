// What differs between two trials: time and memory in a sentence, then memory by role, collectives and leaves.

import { h, replace } from "../shared/dom.js";
import { bytes, seconds, share } from "../shared/format.js";
import { letter, meshNodes, nameNodes } from "./cells.js";
import { leaves } from "./leaves.js";
import { memory, moved } from "./parts.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Choice, Chosen } from "./choice.js" */
/** @import { Changed } from "../shared/store.js" */

/** The section in `pair.element`, hidden while there is no pair; `mark()` follows the choice. */
export class Pair {
  #data;
  #choice;
  #said = h("p", { class: "jsm-lead", "aria-live": "polite" });

  /**
   * @param {Sent.Comparison} data
   * @param {Choice} choice
   */
  constructor(data, choice) {
    this.#data = data;
    this.#choice = choice;
    this.element = h("section", { class: "jsm-cmp-pair", "aria-label": "What differs", hidden: true });
  }

  /** @param {Changed<Chosen>} changed */
  mark({ chosen, other }) {
    if (!chosen && !other) return;
    const { pair } = this.#choice;
    this.element.hidden = pair === null;
    replace(this.element, pair && this.#told(pair));
  }

  /** @param {number[]} pair */
  #told(pair) {
    const { trials, axes, pairs } = this.#data;
    const [a, b] = pair.map((i) => trials[i]);
    const names = { names: axes };
    const called = (/** @type {Sent.Trial} */ trial) =>
      h("span", { class: "jsm-mono" }, nameNodes(trial), " ", meshNodes(trial, axes));
    replace(this.#said, sentence(a, b));
    const parts = [memory(pairs.memory, pair), moved(pairs.moved, pair, names)];
    return [
      h("h3", {}, letter("A"), called(a), h("span", { class: "jsm-quiet" }, "beside"), letter("B"), called(b)),
      this.#said,
      h("div", { class: "jsm-cmp-parts" }, parts),
      leaves(pairs.leaves, pair, axes),
    ];
  }
}

/**
 * `fsdp+tp takes 6.3 ms (12%) less than fsdp, and holds 931 MiB (22%) more at its peak.`
 *
 * @param {Sent.Trial} a
 * @param {Sent.Trial} b
 */
function sentence(a, b) {
  const time = more(a.seconds, b.seconds, seconds, "as long");
  const peak = more(a.peak, b.peak, bytes, "as much");
  const [first, second] = [
    time && { does: "takes", ...time, where: "" },
    peak && { does: "holds", ...peak, where: " at its peak" },
  ].filter((each) => each !== null);
  if (!first) return "No figure is known of both.";
  const { does, told, link, where } = first;
  const rest = second ? `, and ${second.does} ${second.told}${second.where}` : "";
  return [h("b", {}, a.label), ` ${does} ${told}${where} ${link} `, h("b", {}, b.label), `${rest}.`];
}

/**
 * How much more or less `a` is than `b`, or `alike`, and the word that leads to `b`; null where either is not known.
 *
 * @param {number | null} a
 * @param {number | null} b
 * @param {(n: number) => string} text
 * @param {string} alike
 */
function more(a, b, text, alike) {
  if (a === null || b === null) return null;
  if (a === b) return { told: alike, link: "as" };
  const part = b > 0 ? ` (${share(Math.abs(a / b - 1))})` : "";
  return { told: `${text(Math.abs(a - b))}${part} ${a < b ? "less" : "more"}`, link: "than" };
}
