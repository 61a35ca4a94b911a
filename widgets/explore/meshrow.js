// The mesh to edit: a name and a size for each axis, one more, one less, and how many devices that takes.

import { hue } from "../shared/axes.js";
import { h, replace } from "../shared/dom.js";
import { count } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { sign } from "../shared/text.js";
import { extended, reduced, renamed, resized, scaled } from "./sizes.js";

/** @import { Axes } from "./trial.js" */
/** @import { Trial } from "./trial.js" */

const NAME = /^[\p{L}_][\p{L}\p{N}_]*$/u;

/** @type {Record<string, boolean>} */
const STEPS = { ArrowUp: true, "+": true, "=": true, ArrowDown: false, "-": false, _: false };
const boxOf = (/** @type {EventTarget | null} */ target) => /** @type {HTMLInputElement} */ (target);
const HOW = "Plus and minus, or the arrow keys, double and halve it; digits set it.";

/**
 * `{element, draw()}`; `say(text)` reads out why an edit was not taken.
 *
 * @param {Trial} trial
 * @param {(text: string) => void} say
 */
export function meshRow(trial, say) {
  const element = h("div", { class: "jsm-ex-mesh" });
  const there = () => trial.laid.count;
  const edit = (/** @type {Axes} */ axes) => trial.set({ axes });

  function draw() {
    const { axes } = trial;
    replace(
      element,
      axes.map(([name, size], i) => axis(name, size, i)),
      more(),
      devices(),
    );
  }

  /**
   * @param {string} name
   * @param {number} size
   * @param {number} i
   */
  function axis(name, size, i) {
    return h(
      "span",
      { class: "jsm-ex-axis", role: "group", "aria-label": `mesh axis ${name}` },
      nameBox(name, i),
      button("\u2212", `halve ${name}`, `less-${i}`, () => edit(scaled(trial.axes, i, false, there()))),
      sizeBox(name, size, i),
      button("+", `double ${name}`, `more-${i}`, () => edit(scaled(trial.axes, i, true, there()))),
      trial.axes.length > 1
        ? button("\u00d7", `remove ${name}`, `drop-${i}`, () => edit(reduced(trial.axes, i)), "jsm-ex-drop")
        : null,
    );
  }

  /** @type {(mark: string, label: string, key: string, onclick: () => void, look?: string) => HTMLElement} */
  const button = (mark, label, key, onclick, look) =>
    h("button", { type: "button", class: look, "aria-label": label, title: label, "data-k": key, onclick }, mark);

  /**
   * @param {string} name
   * @param {number} i
   */
  function nameBox(name, i) {
    return h("input", {
      class: "jsm-mono",
      style: { width: `${Math.max(2, name.length) + 1.8}ch`, "--jsm-own": hue(i) },
      value: name,
      spellcheck: "false",
      autocomplete: "off",
      "aria-label": `name of axis ${i + 1}`,
      title: "Its name: click to change it",
      "data-k": `name-${i}`,
      ...OWN_KEYS,
      onchange: (/** @type {InputEvent} */ { target }) => rename(boxOf(target), name, i),
      onkeydown: ({ key, target }) => {
        if (key === "Escape") boxOf(target).value = name;
      },
    });
  }

  /**
   * @param {HTMLInputElement} box
   * @param {string} from
   * @param {number} i
   */
  function rename(box, from, i) {
    const to = box.value.trim();
    const why = !NAME.test(to)
      ? `'${to}' is no name of an axis: letters, digits and _`
      : trial.axes.some(([name], at) => at !== i && name === to)
        ? `the mesh has an axis ${to} already`
        : null;
    if (why) {
      box.value = from;
      return say(why);
    }
    /** @type {Axes} */
    const axes = trial.axes.map(([name, size], at) => [at === i ? to : name, size]);
    return trial.set({ axes, wishes: renamed(trial.wishes, from, to) });
  }

  /**
   * @param {string} name
   * @param {number} size
   * @param {number} i
   */
  function sizeBox(name, size, i) {
    return h("input", {
      class: "jsm-ex-size",
      style: { width: `${Math.max(2, String(size).length) + 1.4}ch` },
      value: size,
      inputmode: "numeric",
      autocomplete: "off",
      role: "spinbutton",
      "aria-label": `size of ${name}`,
      "aria-valuemin": 1,
      "aria-valuenow": size,
      title: HOW,
      "data-k": `size-${i}`,
      ...OWN_KEYS,
      onfocus: (/** @type {InputEvent} */ { target }) => boxOf(target).select(),
      onchange: (/** @type {InputEvent} */ { target }) => resize(boxOf(target), size, i),
      onkeydown(event) {
        if (!(event.key in STEPS)) return;
        event.preventDefault();
        edit(scaled(trial.axes, i, STEPS[event.key], there()));
      },
    });
  }

  /**
   * @param {HTMLInputElement} box
   * @param {number} size
   * @param {number} i
   */
  function resize(box, size, i) {
    const axes = /^\d{1,4}$/.test(box.value.trim()) ? resized(trial.axes, i, Number(box.value)) : trial.axes;
    if (axes === trial.axes) {
      if (Number(box.value) !== size) say(`${box.value} is no size here: a whole number, and 4,096 devices at most`);
      box.value = String(size);
    } else edit(axes);
  }

  const more = () =>
    h(
      "button",
      { type: "button", class: "jsm-button", "data-k": "axis", onclick: () => edit(extended(trial.axes, there())) },
      "+ axis",
    );

  function devices() {
    const n = trial.devices;
    const limit = there();
    if (limit === null) return h("span", { class: "jsm-small jsm-quiet" }, `${count(n)} device${n === 1 ? "" : "s"}`);
    const told = `${count(n)} of ${count(limit)} devices`;
    if (n <= limit) return h("span", { class: "jsm-small jsm-quiet" }, told);
    const why = "More than there are: layouts and bytes hold all the same, and nothing can be compiled for them here";
    return h("span", { class: "jsm-small jsm-warning", title: why }, sign("warning"), " ", told);
  }

  return { element, draw };
}
