// The chosen trial in words, the line that runs it alone, and what to set beside it.

import { h, replace, uniqueId } from "../shared/dom.js";
import { copyable } from "../shared/text.js";
import { letter, meshNodes, nameNodes } from "./cells.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Choice, Chosen } from "./choice.js" */
/** @import { Changed } from "../shared/store.js" */

const NONE = "\u2013";
const SECOND = "Shift and a click do the same.";

/** The panel in `side.element`; `mark()` follows the choice. */
export class Side {
  #data;
  #choice;
  #told = h("div");
  #select;
  #with;
  #how;

  /**
   * `drawn` says that there is a picture beside it.
   *
   * @param {Sent.Comparison} data
   * @param {Choice} choice
   * @param {boolean} drawn
   */
  constructor(data, choice, drawn) {
    this.#data = data;
    this.#choice = choice;
    this.#how = `Choose a trial in the table${drawn ? " or the picture" : ""}.`;
    const id = uniqueId("with");
    this.#select = h("select", { id, title: SECOND, onchange: () => this.#picked() });
    const label = h("label", { class: "jsm-quiet", for: id }, "compare with");
    this.#with = h("div", { class: "jsm-cmp-with" }, label, this.#select);
    const named = { class: "jsm-cmp-side", role: "group", "aria-label": "The chosen trial" };
    this.element = h("div", named, this.#told, this.#with);
  }

  #picked() {
    const { value } = this.#select;
    this.#choice.set({ other: value === "" ? null : Number(value) });
  }

  /** @param {Changed<Chosen>} changed */
  mark({ chosen: changed, other }) {
    if (!changed && !other) return;
    const { chosen } = this.#choice;
    const { trials } = this.#data;
    this.#with.hidden = chosen === null || trials.length < 2;
    if (chosen === null) return replace(this.#told, h("p", { class: "jsm-quiet" }, this.#how));
    this.#options();
    return replace(this.#told, this.#trial(trials[chosen]));
  }

  #options() {
    const { chosen, other } = this.#choice;
    const option = (/** @type {Sent.Trial} */ { label }, /** @type {number} */ i) =>
      i === chosen ? null : h("option", { value: i, selected: i === other }, label);
    replace(this.#select, h("option", { value: "" }, NONE), this.#data.trials.map(option));
    this.#select.value = other === null ? "" : String(other);
  }

  /** @param {Sent.Trial} trial */
  #trial(trial) {
    const { failed, why, facts, line } = trial;
    return [
      h("h3", { class: "jsm-mono" }, this.#choice.pair ? [letter("A"), " "] : null, nameNodes(trial)),
      h("div", { class: "jsm-mono jsm-quiet" }, meshNodes(trial, this.#data.axes)),
      failed ? h("p", { class: "jsm-cmp-why" }, (why ?? []).join(" ")) : null,
      h(
        "dl",
        {},
        facts.map(([term, told]) => [h("dt", {}, term), h("dd", {}, told)]),
      ),
      failed ? null : [h("div", { class: "jsm-quiet" }, "Run it again as"), copyable(`%%shard ${line}`)],
    ];
  }
}
