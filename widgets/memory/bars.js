// A bar per device, or per group of devices that are alike, stacked by role against the limit.

import { h, replace } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { fullestOf, spoken, standingOut } from "./devices.js";
import { frame, hatches, heightOf, ROW, roomOf, row, TOP } from "./drawing.js";
import { Tip } from "./tip.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Bar } from "./devices.js" */
/** @import { Scale } from "./scale.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

/** The bars in `bars.element`: `draw(plan)` makes them anew, `mark()` follows the selection. */
export class Bars {
  #memory;
  #selection;
  #bars;
  #rows;
  /** @type {SVGElement | undefined} */
  #frame;
  #hatch = hatches();
  #tip;
  /** @type {number | null} */
  #active = null; // the row that the Tab key reaches, null until the keyboard has been there
  /** @type {number | null} */
  #focused = null; // the row that the keyboard is on

  /**
   * @param {Sent.Memory} memory
   * @param {Mesh} mesh
   * @param {Selection} selection
   * @param {Bar[]} bars
   * @param {import("./devices.js").Bar[]} bars
   */
  constructor(memory, mesh, selection, bars) {
    this.#memory = memory;
    this.#selection = selection;
    this.#bars = bars;
    this.#tip = new Tip(memory, mesh);
    this.#rows = bars.map((bar, i) => this.#option(bar, i));
    const list = h(
      "div",
      { ...OWN_KEYS, role: "listbox", "aria-label": "Devices by memory", onkeydown: (event) => this.#press(event) },
      this.#rows,
    );
    const height = `${heightOf(bars)}px`;
    const attributes = { class: "jsm-bars", style: { height }, onpointerleave: () => this.#leave() };
    this.element = h("div", attributes, list, this.#tip.element);
  }

  /**
   * @param {Bar} bar
   * @param {number} i
   */
  #option(bar, i) {
    return h("div", {
      class: "jsm-bar-row",
      role: "option",
      "aria-label": spoken(this.#memory, bar),
      style: { top: `${TOP + i * ROW}px`, height: `${ROW}px` },
      onpointermove: (event) => this.#point(i, event.clientX),
      onclick: () => this.#choose(i),
      onfocus: () => this.#focus(i),
      onblur: () => this.#blur(),
    });
  }

  /** @param {Scale} plan */
  draw(plan) {
    const at = fullestOf(this.#memory, this.#bars);
    const strong = standingOut(this.#memory, this.#bars);
    const room = roomOf(this.#memory, this.#bars, at, plan);
    this.#bars.forEach((bar, i) => {
      const told = { room: i === at ? room : null, strong: strong.has(i) };
      replace(this.#rows[i], row(this.#memory, bar, plan, told, this.#hatch));
    });
    this.#frame?.remove();
    const behind = frame(this.#memory, this.#bars, plan, room, this.#hatch);
    this.element.prepend(behind);
    this.#frame = behind;
    this.#tip.hide();
  }

  /** Show which row holds the chosen device, and which the one that is pointed at. */
  mark() {
    const { device, pointed } = this.#selection;
    const [chosen, under] = [this.#rowOf(device), this.#rowOf(pointed)];
    const active = this.#active ?? Math.max(0, chosen);
    this.#rows.forEach((node, i) => {
      node.setAttribute("aria-selected", String(i === chosen));
      node.classList.toggle("jsm-pointed", i === under);
      node.tabIndex = i === active ? 0 : -1;
    });
  }

  /** @param {Sent.Position | null} position */
  #rowOf(position) {
    return position === null ? -1 : this.#bars.findIndex(({ members }) => members.includes(position));
  }

  /**
   * Choose the row's device; of a group the one that holds most, unless another of it is chosen.
   *
   * @param {number} i
   */
  #choose(i) {
    const { members, top } = this.#bars[i];
    const { device } = this.#selection;
    if (device === null || !members.includes(device)) this.#selection.select({ device: top });
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const at = this.#rows.indexOf(/** @type {HTMLDivElement} */ (event.target));
    const last = this.#rows.length - 1;
    const to = { ArrowDown: Math.min(at + 1, last), ArrowUp: Math.max(at - 1, 0), Home: 0, End: last }[event.key];
    if (to !== undefined) this.#rows[to].focus();
    else if (event.key === "Enter" || event.key === " ") this.#choose(at);
    else if (event.key === "Escape" && !this.#tip.element.hidden) this.#tip.hide();
    else return;
    event.preventDefault();
  }

  /**
   * @param {number} i
   * @param {number} x
   */
  #point(i, x) {
    this.#selection.point(this.#bars[i].top);
    this.#tip.show(this.#bars[i], x, this.#rows[i].getBoundingClientRect());
  }

  /**
   * Whoever comes by keyboard sees what the pointer would show; a click has shown it already.
   *
   * @param {number} i
   */
  #focus(i) {
    this.#active = i;
    this.mark();
    if (!this.#rows[i].matches(":focus-visible")) return;
    this.#focused = i;
    const box = this.#rows[i].getBoundingClientRect();
    this.#point(i, box.left + box.width / 2);
  }

  #blur() {
    if (this.#focused !== null) this.#leave();
    this.#focused = null;
  }

  #leave() {
    this.#tip.hide();
    this.#selection.point(null);
  }
}
