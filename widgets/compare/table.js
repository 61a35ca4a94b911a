// The trials as a table to sort and choose from; those that could not run stand last, each with its reason.

import { h, replace } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { scrollsOn } from "../shared/scrolling.js";
import { copyable, sign } from "../shared/text.js";
import { letter } from "./cells.js";
import { pick } from "./choice.js";
import { columns, sentColumns } from "./columns.js";

/** @import { Column } from "./columns.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Choice, Chosen } from "./choice.js" */
/** @import { Changed } from "../shared/store.js" */

const HINT = "Trials. Arrow keys move, Enter chooses, Shift and Enter sets another beside the chosen one.";
const LONG = 16; // trials from which on the table scrolls by itself, so that the picture stays beside it

/** @type {Record<string, number>} */
const STEPS = { ArrowDown: 1, ArrowUp: -1 };

/** The table in `table.element`; `mark()` follows the choice. */
export class Table {
  #data;
  #choice;
  #columns;
  #rows;
  #heads;
  #body = h("tbody");
  #sorted;
  /** @type {number[]} */
  #order = []; // positions of the trials as they stand in the table
  /** @type {number | null} */
  #active = null; // the trial whose row the Tab key reaches

  /**
   * @param {Sent.Comparison} data
   * @param {Choice} choice
   */
  constructor(data, choice) {
    this.#data = data;
    this.#choice = choice;
    this.#columns = columns(data);
    const first = ["step", "peak", "strategy"].find((key) => this.#columns.some((column) => column.key === key));
    this.#sorted = { key: first ?? "strategy", way: 1 };
    this.#rows = data.trials.map((trial, i) => this.#row(trial, i));
    this.#heads = this.#columns.map((column) => this.#head(column));
    const table = h(
      "table",
      {
        ...OWN_KEYS,
        class: "jsm-table jsm-cmp-table",
        role: "grid",
        "aria-label": HINT,
        "aria-multiselectable": "true",
      },
      h("thead", {}, this.#group(), h("tr", {}, this.#heads)),
      this.#body,
    );
    this.element = h(
      "div",
      { class: data.trials.length > LONG ? "jsm-cmp-scroll jsm-cmp-long" : "jsm-cmp-scroll" },
      table,
    );
    scrollsOn(this.element);
    this.#sort();
  }

  /** The common head of what is sent. */
  #group() {
    const sent = sentColumns(this.#columns);
    if (!sent.length) return null;
    const before = this.#columns.indexOf(sent[0]);
    const after = this.#columns.length - before - sent.length;
    return h(
      "tr",
      { class: "jsm-cmp-group" },
      h("td", { colspan: before }),
      h("th", { colspan: sent.length, scope: "colgroup" }, this.#groupText(sent.length)),
      after ? h("td", { colspan: after }) : null,
    );
  }

  /** @param {number} many */
  #groupText(many) {
    const { unit } = this.#data.sent;
    return many > 1 ? ["sent per device and step, ", unit] : `sent, ${unit}`;
  }

  /** @param {Column} column */
  #head({ key, head, title, look }) {
    const way = h("span", { class: "jsm-cmp-way", "aria-hidden": "true" });
    const button = h("button", { type: "button", title, onclick: () => this.#by(key) }, head, way);
    return h("th", { scope: "col", class: look }, button);
  }

  /** @param {string} key */
  #by(key) {
    this.#sorted = { key, way: this.#sorted.key === key ? -this.#sorted.way : 1 };
    this.#sort();
  }

  /**
   * @param {Sent.Trial} trial
   * @param {number} i
   */
  #row(trial, i) {
    const made = () => this.#columns.map(({ look, make }) => h("td", { class: look }, make(trial)));
    return h(
      "tr",
      {
        class: trial.failed ? "jsm-cmp-failed" : null,
        onclick: (event) => /** @type {Element} */ (event.target).closest("button") ?? this.#pick(i, event),
        onmousedown: (event) => event.shiftKey && event.preventDefault(), // else it selects text
        onkeydown: (event) => event.target === event.currentTarget && this.#press(event, i),
        onfocus: () => this.#focus(i),
        onblur: () => this.#choice.point(null),
        onpointerenter: () => this.#choice.point(i),
        onpointerleave: () => this.#choice.point(null),
      },
      trial.failed ? this.#failed(trial) : made(),
    );
  }

  /**
   * What it is called, and across the other columns why it did not run.
   *
   * @param {Sent.Trial} trial
   */
  #failed(trial) {
    const [strategy, ...rest] = this.#columns;
    const [head, more] = trial.why ?? [];
    const where = more ? h("span", { class: "jsm-quiet" }, ` ${more}`) : null;
    const said = h("span", { class: "jsm-cmp-why" }, h("b", {}, head), where);
    const fix = trial.fix ? [h("span", { class: "jsm-quiet" }, ". Try "), copyable(trial.fix)] : null;
    return [
      h("td", { class: strategy.look }, strategy.make(trial)),
      h("td", { class: "jsm-cmp-fits" }, sign("error", null), h("span", { class: "jsm-error jsm-cmp-wide" }, " no")),
      h("td", { colspan: rest.length - 1 }, said, fix),
    ];
  }

  /**
   * @param {number} i
   * @param {MouseEvent | KeyboardEvent} event
   */
  #pick(i, event) {
    this.#activate(i);
    pick(this.#choice, i, event);
  }

  /**
   * @param {KeyboardEvent} event
   * @param {number} i
   */
  #press(event, i) {
    const at = this.#order.indexOf(i);
    const last = this.#order.length - 1;
    const to = { Home: 0, End: last }[event.key] ?? Math.max(0, Math.min(last, at + (STEPS[event.key] ?? NaN)));
    if (to in this.#order) this.#rows[this.#order[to]].focus();
    else if (event.key === "Enter" || event.key === " ") this.#pick(i, event);
    else if (event.key === "Escape") this.#choice.back();
    else return;
    event.preventDefault();
  }

  /**
   * Whoever comes by keyboard sees in the picture what the pointer would show.
   *
   * @param {number} i
   */
  #focus(i) {
    this.#activate(i);
    if (this.#rows[i].matches(":focus-visible")) this.#choice.point(i);
  }

  /** @param {number} i */
  #activate(i) {
    this.#active = i;
    this.#reach();
  }

  /** One row is what the Tab key reaches: where the keyboard has been, else the chosen one. */
  #reach() {
    const active = this.#active ?? this.#choice.chosen ?? this.#order[0];
    this.#rows.forEach((row, i) => (row.tabIndex = i === active ? 0 : -1));
  }

  #sort() {
    const { key, way } = this.#sorted;
    const { order } = this.#columns.find((column) => column.key === key) ?? this.#columns[0];
    const { trials } = this.#data;
    const value = (/** @type {number} */ i) => (trials[i].failed ? null : order(trials[i]));
    const compare = (/** @type {number} */ a, /** @type {number} */ b) =>
      Number(trials[a].failed) - Number(trials[b].failed) || byValue(value(a), value(b), way) || a - b;
    this.#order = trials.map((_, i) => i).sort(compare);
    this.#columns.forEach((column, i) => {
      const on = column.key === key;
      if (on) this.#heads[i].setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      else this.#heads[i].removeAttribute("aria-sort");
      /** @type {Element} */ (this.#heads[i].querySelector(".jsm-cmp-way")).textContent = on
        ? way > 0
          ? " \u2191"
          : " \u2193"
        : "";
    });
    const focused = this.#rows.find((row) => row.matches(":focus"));
    this.#body.replaceChildren(...this.#order.map((i) => this.#rows[i]));
    focused?.focus();
  }

  /** Scroll the table, and nothing else, until the chosen row is seen. */
  reveal() {
    const { element } = this;
    const row = this.#rows[this.#choice.chosen ?? -1];
    if (!row) return;
    const [box, around] = [row.getBoundingClientRect(), element.getBoundingClientRect()];
    const top = around.top + /** @type {HTMLElement} */ (element.querySelector("thead")).offsetHeight;
    if (box.top < top) element.scrollTop -= top - box.top;
    else if (box.bottom > around.bottom) element.scrollTop += box.bottom - around.bottom;
  }

  /** @param {Changed<Chosen>} changed */
  mark(changed) {
    const { chosen, other, pointed, pair } = this.#choice;
    this.#rows.forEach((row, i) => {
      row.setAttribute("aria-selected", String(i === chosen || i === other));
      row.classList.toggle("jsm-cmp-other", i === other);
      row.classList.toggle("jsm-pointed", i === pointed);
      const which = /** @type {Element} */ (row.querySelector(".jsm-cmp-which"));
      replace(which, pair?.includes(i) ? letter(i === chosen ? "A" : "B") : null);
    });
    this.#reach();
    if (changed.chosen) this.reveal();
  }
}

/**
 * What is not known stands last, either way.
 *
 * @param {string | number | null} a
 * @param {string | number | null} b
 * @param {number} way
 */
function byValue(a, b, way) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  if (typeof a === "number" && typeof b === "number") return way * (a - b);
  return way * String(a).localeCompare(String(b), "en", { numeric: true });
}
