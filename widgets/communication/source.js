// The user's code with what each line moves beside it; a line that moves something opens to tell more.

import { h, s, uniqueId } from "../shared/dom.js";
import { bytes, count, counted, share } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { AT_LEAST, least, over, overText, pieces, SHORT } from "../shared/kinds.js";
import { bytesNodes } from "../shared/text.js";
import { colouring } from "./code.js";
import { detail } from "./detail.js";
import { inUnit, kindsOf, placesOf, unitOf, weigher } from "./lines.js";

/** @import { Colours } from "./code.js" */
/** @import { CodeLine, Gap, Part } from "./lines.js" */
/** @import { Selected } from "../shared/selection.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

const BAR = 13; // px
const HOT = 0.1; // of the step or of all bytes: a line that stands out
const DIGIT = 7; // px of a line number
const NARROW = 26; // px that line numbers take at least

/**
 * A line that opens.
 *
 * @typedef {object} Moving
 * @property {string} key
 * @property {{ source: number | null, line: number | null }} line
 * @property {HTMLElement} node
 * @property {Part} part
 * @property {string} name
 * @property {string | null} text
 */

const NO_LINE = "line not known";
const NO_TEXT = "text not known";

/** @param {Pick<CodeLine, "source" | "number">} line */
const keyOf = ({ source, number }) => `${source}:${number}`;

/** All sources in `element`; one line is open at a time. */
export class SourceView {
  #mesh;
  #selection;
  #weigher;
  #scale; // of all lines alike: unit of the times, weight of the longest bar, and of the whole
  /** @type {Map<string | null, HTMLElement>} */
  #nodes = new Map(); // every line that can be seen, by key
  #measured; // what each line took, by key; empty where nothing was measured
  /** @type {Map<string | null, () => void>} */
  #hidden = new Map(); // what shows a line that is folded away, by key
  /** @type {Moving[]} */
  #moving = []; // in order
  /** @type {string | null} */
  #open = null;
  /** @type {HTMLElement | undefined} */
  #detail;

  /**
   * @param {Sent.Communication} communication
   * @param {Mesh} mesh
   * @param {Selection} selection
   */
  constructor(communication, mesh, selection) {
    this.#mesh = mesh;
    this.#selection = selection;
    this.#weigher = weigher(communication.rows);
    this.#measured = new Map(
      (communication.measured ?? []).map(([source, number, took]) => [keyOf({ source, number }), took]),
    );
    const places = placesOf(communication);
    const lines = places.flatMap(({ items }) => items.flatMap((item) => ("gap" in item ? [] : [item])));
    const parts = lines.flatMap(({ part }) => part ?? []);
    this.#scale = {
      ...unitOf(parts.map(({ seconds }) => seconds ?? 0)),
      most: Math.max(...parts.map(this.#weigher.weight)) || 1,
      whole: this.#weigher.timed ? communication.step_s : communication.total,
    };
    const digits = String(Math.max(0, ...lines.map(({ number }) => number ?? 0))).length;
    this.element = h(
      "div",
      {
        ...OWN_KEYS,
        class: ["jsm-code", this.#weigher.timed && "jsm-timed", this.#measured.size && "jsm-clocked"]
          .filter(Boolean)
          .join(" "),
        style: { "--jsm-digits": `${Math.max(NARROW, digits * DIGIT)}px` },
        onkeydown: (event) => this.#press(event),
      },
      places.map((place) => this.#place(place)),
    );
    this.#tab(this.#moving[0].node);
    selection.on(({ line }) => line && this.#reach(selection.line));
    if (selection.line) requestAnimationFrame(() => this.#reach(selection.line));
    else this.#show(this.#heaviest());
  }

  /** @param {ReturnType<typeof placesOf>[number]} place */
  #place({ name, note, items }) {
    const colours = colouring();
    const { timed } = this.#weigher;
    return h(
      "section",
      { "aria-label": name },
      h(
        "div",
        { class: "jsm-code-head" },
        h("span", {}),
        timed ? h("span", { class: "jsm-num", title: "Predicted time per step" }, this.#scale.unit) : null,
        this.#measured.size
          ? h(
              "span",
              { class: "jsm-num jsm-clock", title: "Measured time per step: compute, moving and waiting" },
              "measured",
            )
          : null,
        h(
          "span",
          { title: timed ? "Of the predicted step" : "Of all bytes that one device sends per step" },
          timed ? "of step" : "share",
        ),
        h("span", { class: "jsm-num jsm-by", title: "Bytes that one device sends per step" }, "sent"),
        h("span", { class: "jsm-code-name" }, name, note === null ? null : `: ${note}`),
        h("span", { class: "jsm-num jsm-kinds-head" }, "collectives"),
      ),
      items.map((item) => ("gap" in item ? this.#gap(item, colours) : this.#line(item, colours, name))),
    );
  }

  /**
   * Lines that are left out: a button where there is text to show.
   *
   * @param {Gap} gap
   * @param {Colours} colours
   */
  #gap({ gap, lines }, colours) {
    const said = `\u2026 ${counted(gap, "line")}`;
    if (!lines.length) {
      colours.jump();
      return h("div", { class: "jsm-gap jsm-small jsm-quiet" }, said);
    }
    const { quote } = colours;
    for (const { text } of lines) colours.line(text ?? "");
    const button = h("button", { type: "button", class: "jsm-button", onclick: () => show(true) }, said);
    const node = h("div", { class: "jsm-gap" }, button);
    const show = (/** @type {boolean} */ focused) => {
      const again = colouring(quote);
      const shown = lines.map((line) => this.#line(line, again));
      for (const line of lines) this.#hidden.delete(keyOf(line));
      node.replaceWith(...shown);
      if (!focused) return;
      shown[0].tabIndex = -1;
      shown[0].focus();
    };
    for (const line of lines) this.#hidden.set(keyOf(line), () => show(false));
    return node;
  }

  /**
   * @param {CodeLine} line
   * @param {Colours} colours
   * @param {string} [name]
   */
  #line({ source, number, text, part }, colours, name) {
    const key = keyOf({ source, number });
    const unknown = h("span", { class: "jsm-quiet" }, number === null ? NO_LINE : NO_TEXT);
    const code = text === null ? unknown : h("pre", {}, colours.line(text));
    const shown = part && this.#moves(part);
    const node = h(
      "div",
      { class: `jsm-line${part ? " jsm-moving" : ""}${shown?.hot ? " jsm-hot" : ""}` },
      h("span", { class: "jsm-line-number" }, number),
      this.#weigher.timed ? h("span", { class: "jsm-num" }, shown?.time) : null,
      this.#measured.size ? h("span", { class: "jsm-num jsm-clock" }, this.#measured.get(key)) : null,
      h("span", { class: "jsm-heat" }, shown?.heat),
      h("span", { class: "jsm-num jsm-by jsm-quiet" }, part && least(bytesNodes(part.sent), part.exact)),
      h("span", { class: "jsm-code-text" }, code, shown?.kinds),
    );
    this.#nodes.set(key, node);
    const named = number === null ? (name ?? "") : `${name}, line ${number}`;
    if (part) this.#opens({ key, line: { source, line: number }, node, part, name: named, text });
    return node;
  }

  /** @param {Moving} line */
  #opens(line) {
    line.node.setAttribute("role", "button");
    line.node.setAttribute("aria-label", this.#spoken(line));
    line.node.addEventListener("click", () => this.#choose(line.key));
    this.#moving.push(line);
  }

  /**
   * The cells of a line that moves something.
   *
   * @param {Part} part
   */
  #moves(part) {
    const { weight, timed } = this.#weigher;
    const { most, whole } = this.#scale;
    const kinds = kindsOf(part.rows, weight);
    const of = whole ? weight(part) / whole : null;
    const parts = kinds.map((each) => ({ kind: each.kind ?? "", axes: each.axes, size: (100 * weight(each)) / most }));
    const told = of === null ? null : `${share(of)} of ${timed ? "the predicted step" : "all bytes sent"}`;
    return {
      time: timed && part.seconds !== null ? least(inUnit(part.seconds, this.#scale), part.exact) : null,
      heat: s("svg", { width: "100%", height: BAR, "aria-hidden": "true" }, s("title", {}, told), pieces(parts, BAR)),
      hot: of !== null && of > HOT,
      kinds: h(
        "span",
        { class: "jsm-kinds" },
        kinds.map((each) => this.#kind(each)),
      ),
    };
  }

  /**
   * `A2A expert ×96 dispatch`.
   *
   * @param {Part} part
   */
  #kind({ rows, kind, axes, size, count: times, exact }) {
    const often = times > 1 || !exact ? [" \u00d7", least(count(times), exact)] : null;
    const title = exact ? kind : `${kind}. ${AT_LEAST}`;
    const jobs = new Set(rows.flatMap(({ job }) => job ?? []));
    return h(
      "span",
      { title },
      h("b", {}, SHORT[kind ?? ""] ?? kind),
      " ",
      over(axes, size, this.#mesh),
      often,
      jobs.size > 0 && ` ${[...jobs].join(", ")}`,
    );
  }

  /** @param {Moving} line */
  #spoken({ key, name, part, text }) {
    const { weight, timed } = this.#weigher;
    const { unit, whole } = this.#scale;
    const atLeast = part.exact ? "" : "at least ";
    const time = timed && part.seconds !== null ? [`${atLeast}${inUnit(part.seconds, this.#scale)} ${unit}`] : [];
    const clock = this.#measured.has(key) ? [`measured ${this.#measured.get(key)}`] : [];
    const of = whole ? [`${share(weight(part) / whole)} of ${timed ? "the step" : "all"}`] : [];
    const kinds = kindsOf(part.rows, weight).map(
      ({ kind, axes, size, count: times, exact }) =>
        `${kind} over ${overText(axes, size, this.#mesh)}, ${exact ? "" : "at least "}${counted(times, "time")}`,
    );
    const code = text === null ? "" : `. ${text.trim()}`;
    return `${name}: ${[...time, ...clock, ...of, `${atLeast}${bytes(part.sent)} sent`, ...kinds].join("; ")}${code}`;
  }

  #heaviest() {
    const { weight } = this.#weigher;
    return this.#moving.reduce((a, b) => (weight(b.part) > weight(a.part) ? b : a)).key;
  }

  /**
   * The Tab key reaches one line, arrows the others.
   *
   * @param {HTMLElement} node
   */
  #tab(node) {
    for (const each of this.#moving) each.node.tabIndex = each.node === node ? 0 : -1;
  }

  /**
   * Open a line, null for none.
   *
   * @param {string | null} key
   */
  #show(key) {
    this.#detail?.remove();
    this.#detail = undefined;
    this.#open = key;
    for (const each of this.#moving) {
      const open = each.key === key;
      each.node.setAttribute("aria-expanded", String(open));
      if (!open) {
        each.node.removeAttribute("aria-controls");
        continue;
      }
      const opened = detail(each.part.rows, this.#weigher, this.#mesh, `What moves: ${each.name}`);
      opened.id = uniqueId("moves");
      each.node.setAttribute("aria-controls", opened.id);
      each.node.after(opened);
      this.#detail = opened;
      this.#tab(each.node);
    }
  }

  /** @param {string} key */
  #choose(key) {
    const open = key === this.#open ? null : key;
    this.#show(open);
    this.#selection.select({ line: this.#moving.find(({ key: each }) => each === open)?.line ?? null });
  }

  /**
   * Show a line that was chosen elsewhere.
   *
   * @param {Selected["line"]} line
   */
  #reach(line) {
    const key = line && keyOf({ source: line.source, number: line.line });
    this.#hidden.get(key)?.();
    for (const [each, node] of this.#nodes) node.classList.toggle("jsm-chosen", each === key);
    if (key !== this.#open) this.#show(key);
    this.#nodes.get(key)?.scrollIntoView({ block: "nearest" });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const at = this.#moving.findIndex(({ node }) => node === event.target);
    if (at < 0) return;
    const last = this.#moving.length - 1;
    const to = { ArrowDown: Math.min(at + 1, last), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (to !== undefined) {
      this.#tab(this.#moving[to].node);
      this.#moving[to].node.focus();
    } else if (event.key === "Enter" || event.key === " ") this.#choose(this.#moving[at].key);
    else return;
    event.preventDefault();
  }
}
