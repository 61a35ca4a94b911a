// An explorer in a notebook: a mesh, a strategy and an array to cut, what each device then holds, and the line for it.

import detailStyle from "../layout/detail.css";
import layoutStyle from "../layout/layout.css";
import { defaultLeaf } from "../layout/rows.js";
import { paint } from "../shared/axes.js";
import { h, replace } from "../shared/dom.js";
import { drawn } from "../shared/page.js";
import { saving } from "../shared/saving.js";
import { sign, typed } from "../shared/text.js";
import { compiledTable } from "./compiled.js";
import { dims } from "./dims.js";
import style from "./explore.css";
import { focusedKey, focusIn } from "./focus.js";
import { meshRow } from "./meshrow.js";
import { out } from "./out.js";
import { picker } from "./picker.js";
import { pictures } from "./pictures.js";
import { sums } from "./sums.js";
import { follow, Trial } from "./trial.js";
import { wished, worked } from "./worked.js";

export * as cuts from "./cuts.js";
export * as line from "./line.js";

const SAID_FOR = 6000; // ms
const NOT_PLANNED = "laid out as for the mesh it was planned on: planning another needs the notebook";
const DRAWN = /** @type {const} */ (["axes", "strategy", "wishes", "leaf", "laid", "compiled"]);

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Worked } from "./worked.js" */
/** @import { Context } from "../shared/page.js" */
/** @import { Cut, Explorer } from "../shared/payload_types.js" */

/**
 * Draw the explorer of `model` in `el`; returns what takes it away again.
 *
 * @param {Context} context
 */
export const render = (context) =>
  drawn(context, "explorer", [style, layoutStyle, detailStyle], (root, /** @type {Explorer} */ data, ends) => {
    const trial = new Trial();
    const end = follow(trial, context.model, data.leaves.path);
    ends.push(end);
    const compile = () => {
      end.flush();
      trial.set({ compiled: "asked" });
      context.model.send({ kind: "compile" });
    };
    const picture = () => {
      end.flush();
      return "layout";
    };
    root.append(view(data, trial, context, compile, picture));
  });

/**
 * @param {Explorer} data
 * @param {Trial} trial
 * @param {Context} context
 * @param {() => void} compile
 * @param {() => string} picture
 */
function view(data, trial, context, compile, picture) {
  const status = saying();
  /** @type {number | undefined} */
  let leaf; // the one on show: once it is found it stays, whatever the edits make of the others
  /** @param {Cut | null} cut */
  const edit = (cut) => trial.set({ wishes: wished(data.leaves, trial.wishes, /** @type {number} */ (leaf), cut) });
  const parts = {
    mesh: meshRow(trial, status.say),
    strategy: strategyRow(data, trial, context.model.get("_alone")),
    array: picker(trial),
    type: typeRow(trial, () => edit(null)),
    dims: dims(trial, edit),
    sums: sums(data),
    pictures: pictures(trial),
    out: out(data, trial, context, compile, status),
    compiled: compiledTable(trial),
  };
  const { mesh, strategy, array, type } = parts;
  const label = (/** @type {string} */ text) => h("span", { class: "jsm-ex-label" }, text);
  const element = h(
    "div",
    { class: "jsm-ex" },
    h(
      "div",
      { class: "jsm-ex-body" },
      h(
        "div",
        { class: "jsm-ex-edit" },
        h(
          "div",
          { class: "jsm-ex-top" },
          label("mesh"),
          mesh.element,
          data.strategies.length ? [label("strategy"), strategy.element] : null,
          label("array"),
          h("div", { class: "jsm-ex-array" }, array.element, type.element),
        ),
        parts.dims.element,
        parts.sums.element,
      ),
      parts.pictures.element,
    ),
    parts.out.element,
    parts.compiled.element,
    context.model.get("_alone") ? null : saving(context.model, picture), // that a page has is of before its edits
  );

  function draw() {
    const key = focusedKey(element);
    const work = worked(data, trial);
    paint(element, work.mesh.names);
    const shown = trial.leaf ?? leaf ?? first(data, trial, work);
    leaf = shown;
    if (trial.device !== null && trial.device >= trial.devices) trial.set({ device: null });
    for (const part of Object.values(parts)) part.draw(work, shown);
    if (key !== undefined && focusedKey(element) !== key) focusIn(element, key, { preventScroll: true });
  }

  trial.on((changed) => {
    if (DRAWN.some((name) => changed[name])) draw();
    else if (changed.device || changed.pointed) parts.pictures.show(changed);
  });
  draw();
  return element;
}

/**
 * The array to begin with: one that is set by hand, else the largest.
 *
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {Worked} work
 */
function first(data, trial, work) {
  const byHand = data.leaves.path.findIndex((path) => path in trial.wishes);
  return byHand < 0 ? (defaultLeaf(work.view) ?? 0) : byHand;
}

/** `{element, say(text)}`: a line that is read aloud, and stands for some seconds. */
function saying() {
  const element = h("span", { class: "jsm-small jsm-quiet", role: "status" });
  /** @type {number | undefined} */
  let timer;
  const say = (/** @type {string} */ text) => {
    replace(element, text);
    clearTimeout(timer);
    timer = setTimeout(() => replace(element), SAID_FOR);
  };
  return { element, say };
}

/**
 * Which strategy lays out what is not set by hand, and what the kernel says of that.
 *
 * @param {Sent.Explorer} data
 * @param {Trial} trial
 * @param {boolean} alone
 */
function strategyRow(data, trial, alone) {
  const select = h("select", {
    "aria-label": "strategy",
    "data-k": "strategy",
    onchange: () => trial.set({ strategy: select.value }),
  });
  const note = h("span", { class: "jsm-small jsm-quiet jsm-ex-note", role: "status" });
  const fixed = h("code", {});
  const element = h("div", { class: "jsm-ex-strategy" }, alone ? fixed : select, note);

  function draw() {
    const known = data.strategies.includes(trial.strategy) ? data.strategies : [trial.strategy, ...data.strategies];
    if (select.options.length !== known.length)
      replace(
        select,
        known.map((name) => h("option", { value: name }, name)),
      );
    select.value = trial.strategy;
    replace(fixed, trial.strategy);
    const { laid } = trial;
    const answered = laid.strategy === trial.strategy && String(laid.mesh) === String(trial.axes);
    if (!answered) replace(note, alone ? NOT_PLANNED : "the kernel is asked how it lays the other arrays out");
    else replace(note, laid.note ? [sign("warning"), " ", laid.note] : null);
  }

  return { element, draw };
}

/**
 * The array's type, and a way back to the strategy's layout.
 *
 * @param {Trial} trial
 * @param {() => void} reset
 */
function typeRow(trial, reset) {
  const element = h("div", { class: "jsm-ex-type" });

  /**
   * @param {Worked} work
   * @param {number} leaf
   */
  function draw(work, leaf) {
    const edited = work.view.leaves.path[leaf] in trial.wishes;
    const back = h(
      "button",
      {
        type: "button",
        class: "jsm-button",
        "data-k": "reset",
        title: "Leave it to the strategy again",
        onclick: reset,
      },
      "reset",
    );
    replace(element, typed(work.mesh, work.leaf(leaf)), edited ? back : null);
  }

  return { element, draw };
}
