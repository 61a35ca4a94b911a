// Each dimension of the array with the axes that may cut it, what that makes of it, and what does not divide.

import { cutLines } from "../layout/plan.js";
import { dash, hue } from "../shared/axes.js";
import { h, replace, s } from "../shared/dom.js";
import { count } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { nextSize, parts } from "./cuts.js";
import { focusIn } from "./focus.js";

const MOST_LINES = 64;

/** @type {Record<string, number[]>} */
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** @import { Worked } from "./worked.js" */
/** @import { Leaf } from "../shared/mesh.js" */
/** @import { Cut } from "../shared/payload_types.js" */
/** @import { Trial } from "./trial.js" */

/**
 * `{element, draw(work, leaf)}`; `edit(cut)` is given the array's cut as it was clicked.
 *
 * @param {Trial} trial
 * @param {(cut: Cut) => void} edit
 */
export function dims(trial, edit) {
  const element = h("div", { class: "jsm-ex-dims", ...OWN_KEYS, onkeydown: key });
  /** @type {Cut} */
  let cut = [];
  /** @type {number[]} */
  let shape = [];
  let reached = "0"; // the chip that the Tab key reaches: `dim-axis`

  /**
   * @param {Worked} work
   * @param {number} leaf
   */
  function draw(work, leaf) {
    shape = work.view.leaves.shape[leaf];
    cut = work.cuts[leaf];
    const rows = shape.map((_, dim) => row(work, leaf, dim));
    const none = h("div", { class: "jsm-ex-dim jsm-quiet" }, "one value: it has no dimension to cut");
    replace(element, rows.length ? rows : none);
    const chips = [...element.querySelectorAll("button")];
    const first = chips.find((chip) => chip.dataset.k === reached) ?? chips[0];
    for (const chip of chips) chip.tabIndex = chip === first ? 0 : -1;
  }

  /**
   * @param {Worked} work
   * @param {number} leaf
   * @param {number} dim
   */
  function row(work, leaf, dim) {
    const size = shape[dim];
    const { sizes } = trial;
    const alone = [...sizes].filter(([, n]) => size % n);
    const pieces = parts(cut[dim], sizes);
    return h(
      "div",
      { class: "jsm-ex-dim" },
      h("span", { class: "jsm-small jsm-quiet" }, `dim ${dim}`),
      h("span", { class: "jsm-ex-length" }, size),
      h(
        "span",
        { class: "jsm-ex-chips", role: "group", "aria-label": `axes that cut dim ${dim}` },
        trial.axes.map(([axis], i) => chip(dim, axis, i)),
      ),
      h(
        "div",
        { class: "jsm-ex-effect" },
        pieces > 1
          ? h("b", {}, `${count(pieces)} \u00d7 ${size / pieces}`)
          : h("span", { class: "jsm-quiet" }, "whole"),
        ruler(work.leaf(leaf), dim, pieces),
      ),
      alone.length ? h("div", { class: "jsm-ex-odd" }, oddText(size, alone)) : null,
    );
  }

  /**
   * @param {number} dim
   * @param {string} axis
   * @param {number} i
   */
  function chip(dim, axis, i) {
    const pressed = cut[dim].includes(axis);
    const elsewhere = cut.findIndex((axes, at) => at !== dim && axes.includes(axis));
    const odd = !pressed && shape[dim] % parts([...cut[dim], axis], trial.sizes) !== 0;
    const look = ["jsm-ex-chip", elsewhere >= 0 && "jsm-ex-elsewhere"].filter(Boolean).join(" ");
    const key = `chip-${dim}-${axis}`;
    return h(
      "button",
      {
        type: "button",
        class: look,
        style: { "--jsm-own": hue(i) },
        "aria-pressed": String(pressed),
        "aria-disabled": odd ? "true" : null,
        "aria-label": `cut dim ${dim} over ${axis}`,
        title: odd ? why(dim, axis) : hint(dim, axis, pressed, elsewhere),
        "data-k": key,
        onclick: () => !odd && toggle(dim, axis),
        onfocus: (/** @type {FocusEvent} */ { target }) => reach(/** @type {HTMLElement} */ (target), key),
      },
      axis,
    );
  }

  /**
   * @param {number} dim
   * @param {string} axis
   */
  function why(dim, axis) {
    const over = [...cut[dim], axis].map((name) => `${name}=${trial.sizes.get(name)}`).join(" \u00d7 ");
    return `${shape[dim]} does not divide by ${over}`;
  }

  /**
   * @param {number} dim
   * @param {string} axis
   * @param {boolean} pressed
   * @param {number} elsewhere
   */
  function hint(dim, axis, pressed, elsewhere) {
    if (pressed)
      return cut[dim].length > 1 ? "click takes it off; Shift and an arrow key change the order" : "click takes it off";
    return elsewhere >= 0 ? `click moves ${axis} here from dim ${elsewhere}` : "click cuts here";
  }

  /**
   * An axis cuts one dimension: where it is put it is taken from the others. The last one put is the minor one.
   *
   * @param {number} dim
   * @param {string} axis
   */
  function toggle(dim, axis) {
    const on = !cut[dim].includes(axis);
    const rest = cut.map((axes) => axes.filter((name) => name !== axis));
    edit(rest.map((axes, at) => (on && at === dim ? [...axes, axis] : axes)));
  }

  /**
   * @param {HTMLElement} node
   * @param {string} key
   */
  function reach(node, key) {
    reached = key;
    for (const each of element.querySelectorAll("button")) each.tabIndex = each === node ? 0 : -1;
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    const move = MOVES[event.key];
    const [, dim, ...rest] = /** @type {HTMLElement} */ (event.target).dataset.k?.split("-") ?? [];
    if (!move || dim === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const axis = rest.join("-");
    if (event.shiftKey) return move[1] && reorder(Number(dim), axis, move[1]);
    const at = trial.axes.findIndex(([name]) => name === axis);
    const [down, across] = [Number(dim) + move[0], at + move[1]];
    const to = trial.axes[across]?.[0];
    focusIn(element, `chip-${down}-${to ?? ""}`);
    return undefined;
  }

  /**
   * A pressed axis earlier or later among those that cut the dimension.
   *
   * @param {number} dim
   * @param {string} axis
   * @param {number} step
   */
  function reorder(dim, axis, step) {
    const from = cut[dim].indexOf(axis);
    const to = from + step;
    if (from < 0 || to < 0 || to >= cut[dim].length) return;
    const axes = cut[dim].toSpliced(from, 1).toSpliced(to, 0, axis);
    edit(cut.map((old, at) => (at === dim ? axes : old)));
  }

  return { element, draw };
}

/**
 * @param {number} size
 * @param {[axis: string, size: number][]} alone
 */
function oddText(size, alone) {
  const over = alone.map(([axis, n]) => `${axis}=${n}`);
  const named = over.length > 2 ? `${over.slice(0, -1).join(", ")} or ${over.at(-1)}` : over.join(" or ");
  return `${size} does not divide by ${named}; the next size that does is ${nextSize(
    size,
    alone.map(([, n]) => n),
  )}`;
}

/**
 * The dimension as a bar, cut where each axis cuts it.
 *
 * @param {Leaf} leaf
 * @param {number} dim
 * @param {number} pieces
 */
function ruler(leaf, dim, pieces) {
  const lines = pieces > MOST_LINES ? [] : cutLines(leaf, leaf.spec[dim]);
  const dense = pieces > MOST_LINES ? hue(leaf.spec[dim].at(-1) ?? 0) : null;
  return s(
    "svg",
    { width: "100%", height: 16, "aria-hidden": "true" },
    s("rect", { y: 3, width: "100%", height: 10, fill: "var(--jsm-fill-2)" }),
    dense && s("rect", { y: 3, width: "100%", height: 10, fill: dense, opacity: 0.5 }),
    lines.flatMap(({ axis, at }) =>
      at.map((i) => {
        const x = `${(100 * i) / pieces}%`;
        const stroke = { stroke: hue(axis), "stroke-width": 1.75, "stroke-dasharray": dash(axis) };
        return s("line", { x1: x, x2: x, y1: 1, y2: 15, ...stroke });
      }),
    ),
  );
}
