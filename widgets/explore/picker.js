// The array to look at: its path to type a part of, and the list of all arrays below it while that is open.

import { searcher } from "../layout/search.js";
import { tree } from "../layout/tree.js";
import { h, replace, uniqueId } from "../shared/dom.js";
import { count, counted } from "../shared/format.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { Selection } from "../shared/selection.js";

/** @import { Trial } from "./trial.js" */
/** @import { Worked } from "./worked.js" */

/**
 * `{element, draw(work, leaf)}`.
 *
 * @param {Trial} trial
 */
export function picker(trial) {
  const id = uniqueId("arrays");
  const list = h("div", { class: "jsm-ex-list", id, hidden: true });
  const input = h("input", {
    class: "jsm-filter jsm-mono",
    spellcheck: "false",
    autocomplete: "off",
    role: "combobox",
    "aria-label": "array: type a part of its path, type or role",
    "aria-expanded": "false",
    "aria-controls": id,
    title: "Type a part of a path, 3072, bf16, @model or params; arrow keys walk through what is found",
    "data-k": "array",
    ...OWN_KEYS,
    onclick: () => open(""),
    oninput: () => open(input.value),
    onkeydown: key,
  });
  const element = h("div", { class: "jsm-ex-picker", onfocusout: left }, input, list);
  /** @type {Worked} */
  let work;
  let leaf = 0;
  /** @type {ReturnType<typeof tree> | null} */
  let leaves = null; // the list while it is open
  /** @type {Set<number> | null} */
  let found = null;
  let query = "";

  /**
   * @param {Worked} now
   * @param {number} shown
   */
  function draw(now, shown) {
    [work, leaf] = [now, shown];
    if (leaves && query) return;
    input.value = work.view.leaves.path[leaf];
    input.style.width = `${Math.min(46, Math.max(18, input.value.length + 2.5))}ch`;
  }

  /** @param {string} typed */
  function open(typed) {
    query = typed;
    if (!leaves) {
      if (!query) input.select();
      const shown = new Selection({ leaf });
      shown.on((changed) => changed.leaf && trial.select({ leaf: shown.leaf }));
      const told = h("span", { class: "jsm-small jsm-quiet", role: "status" });
      const listing = (/** @type {Set<number> | null} */ which) => {
        found = which;
        const all = counted(work.view.leaves.path.length, "array");
        replace(told, which === null ? all : `${count(which.size)} of ${all}`);
      };
      list.hidden = false;
      const find = searcher(work.view, work.mesh);
      leaves = tree(work.view, work.mesh, shown, { find, cleared: () => {}, listing });
      leaves.element.addEventListener("keydown", chosen, true);
      leaves.element.addEventListener("click", ({ target }) => {
        if (/** @type {Element} */ (target).closest(".jsm-tree-leaf")) close();
      });
      replace(list, leaves.element, told);
      input.setAttribute("aria-expanded", "true");
    }
    leaves.show({ query });
  }

  function shut() {
    if (!leaves) return;
    leaves = found = null;
    list.hidden = true;
    replace(list);
    input.setAttribute("aria-expanded", "false");
    draw(work, leaf);
  }

  function close() {
    input.focus(); // before the list goes, or the focus would be lost with it
    shut();
  }

  /**
   * Enter takes the first that was found.
   *
   * @param {KeyboardEvent} event
   */
  function key(event) {
    if (event.key === "ArrowDown") {
      if (!leaves) open("");
      leaves?.focus();
    } else if (event.key === "Enter" && leaves) {
      const first = work.view.rows.map(([, , [each]]) => each).find((each) => found?.has(each));
      if (first !== undefined) trial.select({ leaf: first });
      close();
    } else if (event.key === "Escape" && leaves) close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /**
   * In the list: Escape closes it, and Enter on an array, which the arrow keys chose already.
   *
   * @param {KeyboardEvent} event
   */
  function chosen(event) {
    const id = leaves?.element.getAttribute("aria-activedescendant") ?? "none";
    const active = list.querySelector(`#${CSS.escape(id)}`);
    const opens = active?.hasAttribute("aria-expanded");
    if (event.key !== "Escape" && !(event.key === "Enter" && !opens)) return;
    event.preventDefault();
    event.stopPropagation();
    close();
  }

  /** @param {FocusEvent} event */
  function left({ relatedTarget }) {
    if (!relatedTarget || !element.contains(/** @type {Node} */ (relatedTarget))) shut();
  }

  return { element, draw };
}
