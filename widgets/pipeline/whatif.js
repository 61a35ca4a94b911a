// What the same work would cost under another schedule or other sizes: chosen here, simulated beforehand.

import { h, replace } from "../shared/dom.js";
import { bytes, UNKNOWN } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { copyable } from "../shared/text.js";
import { chart } from "./chart.js";
import { Choices } from "./choices.js";
import { number, percent, time } from "./say.js";

/** @import { Setting } from "./choices.js" */
/** @import * as Sent from "../shared/payload_types.js" */

/** @type {Record<string, string>} */
const SAYS = {
  schedule: "The order in which each rank runs its actions",
  stages: "Ranks of the pipeline: parts that the model is cut into",
  microbatches: "Parts that the batch is cut into; twice as many are half as large each",
  chunks: "Stages that each rank holds",
};
const FULLEST = "Activations on the fullest rank, in microbatches of the size that they have now";

/** @type {Record<string, number>} */
const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export class WhatIf {
  #data;
  #choices;
  #choice;
  /** @type {Map<keyof Setting, { values: (string | number)[], buttons: HTMLElement[] }>} */
  #groups = new Map();
  #reason = h("p", { class: "jsm-pp-reason", "aria-live": "polite" });
  #told = h("div", { class: "jsm-pp-table" });
  #chart = h("div", { class: "jsm-pp-small" });

  /** @param {Sent.Pipeline} data */
  constructor(data) {
    this.#data = data;
    this.#choices = new Choices(data);
    this.#choice = this.#choices.first;
    const { values: all } = this.#choices;
    const names = /** @type {(keyof typeof all)[]} */ (Object.keys(all));
    const controls = names.map((name) => [
      h("span", { class: "jsm-quiet", title: SAYS[name] }, name),
      this.#group(name, all[name]),
    ]);
    this.element = h(
      "div",
      { class: "jsm-pp-whatif" },
      h("h3", {}, "What if"),
      h("div", {}, h("div", { class: "jsm-pp-controls" }, controls), this.#reason),
      this.#told,
      this.#chart,
    );
    this.#draw();
  }

  /**
   * @param {keyof Setting} name
   * @param {(string | number)[]} values
   */
  #group(name, values) {
    const buttons = values.map((value) =>
      h(
        "button",
        {
          type: "button",
          role: "radio",
          onclick: () => this.#choose(name, value),
          onfocus: () => this.#explain(name, value),
        },
        value,
      ),
    );
    this.#groups.set(name, { values, buttons });
    const attributes = { ...OWN_KEYS, class: "jsm-pp-buttons", role: "radiogroup", "aria-label": name };
    return h("div", { ...attributes, onkeydown: (event) => this.#press(event, buttons) }, buttons);
  }

  /**
   * @param {KeyboardEvent} event
   * @param {HTMLElement[]} buttons
   */
  #press(event, buttons) {
    const at = buttons.indexOf(/** @type {HTMLElement} */ (event.target));
    const to = { Home: 0, End: buttons.length - 1 }[event.key] ?? at + (STEPS[event.key] ?? NaN);
    if (!(to in buttons)) return;
    event.preventDefault();
    buttons[to].focus();
    buttons[to].click();
  }

  /**
   * @param {keyof Setting} name
   * @param {string | number} value
   */
  #choose(name, value) {
    const next = this.#choices.changed(this.#choice, { [name]: value });
    if (!next) return this.#explain(name, value);
    this.#choice = next;
    this.#reason.textContent = "";
    this.#draw();
  }

  /**
   * Say below the buttons why one of them cannot be chosen.
   *
   * @param {keyof Setting} name
   * @param {string | number} value
   */
  #explain(name, value) {
    const can = this.#choices.changed(this.#choice, { [name]: value });
    this.#reason.textContent = can ? "" : this.#choices.why(this.#choice, { [name]: value });
  }

  #draw() {
    for (const [name, { values, buttons }] of this.#groups) {
      buttons.forEach((button, i) => {
        const on = this.#choice[name] === values[i];
        const can = on || this.#choices.changed(this.#choice, { [name]: values[i] }) !== null;
        button.setAttribute("aria-checked", String(on));
        button.tabIndex = on ? 0 : -1;
        if (can) button.removeAttribute("aria-disabled");
        else button.setAttribute("aria-disabled", "true");
        button.title = can ? "" : this.#choices.why(this.#choice, { [name]: values[i] });
      });
    }
    replace(this.#told, this.#table(), copyable(this.#line()));
    replace(this.#chart, chart(this.#choices, this.#choice));
  }

  /** What a step would be asked for with. */
  #line() {
    const { schedule, stages, microbatches, chunks } = this.#choice;
    const more = this.#choices.chunksOf(this.#choice).length > 1 || chunks > 1 ? ` --chunks ${chunks}` : "";
    return `--schedule ${schedule} --stages ${stages} --microbatches ${microbatches}${more}`;
  }

  #table() {
    const { unit, now } = this.#data;
    const row = this.#choices.row(this.#choice);
    if (!row) return null;
    const known = now.bytes !== null && now.peak;
    const held = (/** @type {number | null} */ peak) =>
      peak === null ? UNKNOWN : now.bytes !== null && now.peak ? bytes((now.bytes * peak) / now.peak) : number(peak);
    const lines = [
      ["bubble, predicted", "With each stage's own time, and transfers", percent(now.bubble), percent(row.bubble)],
      ["bubble, ideal", "Were all stages alike and transfers free", percent(now.ideal), percent(row.ideal)],
      [
        "makespan, predicted",
        "From the first start to the last end of a step",
        time(now.makespan, unit),
        time(row.makespan, unit),
      ],
      [known ? "activations, fullest rank" : "microbatches held at most", FULLEST, held(now.peak), held(row.peak)],
    ];
    const head = (/** @type {string} */ sign, /** @type {string} */ text) =>
      h("th", { scope: "col", class: "jsm-num" }, h("i", { class: `jsm-pp-dot ${sign}` }), text);
    return h(
      "table",
      { class: "jsm-table", "aria-label": "Now, and what if" },
      h("thead", {}, h("tr", {}, h("td", {}), head("jsm-pp-now", "now"), head("jsm-pp-if", "what if"))),
      h(
        "tbody",
        {},
        lines.map(([name, title, is, would]) =>
          h(
            "tr",
            {},
            h("th", { scope: "row", title }, name),
            h("td", { class: "jsm-num" }, is),
            h("td", { class: "jsm-num" }, h("b", {}, would)),
          ),
        ),
      ),
    );
  }
}
