// The list of leaves. Only the rows in view are in the page, so that thousands scroll as ten do.

import { h, replace, uniqueId } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { scrollsOn } from "../shared/scrolling.js";
import { roleNodes, rowMaker } from "./row.js";
import { defaultLeaf, HEIGHT, listed } from "./rows.js";
import { wordsOf } from "./search.js";
import { viewport } from "./viewport.js";

/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */
/** @import { LeafList, Row } from "./rows.js" */
/** @import { searcher } from "./search.js" */

/**
 * The tree, and `show({query, bySize})` to change what it lists. `cleared()` is called when a leaf that was chosen
 * elsewhere is hidden by the query; `listing(found)` with the set of leaves listed, null for all.
 *
 * @param {LeafList} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 * @param {object} query
 * @param {ReturnType<typeof searcher>} query.find
 * @param {() => void} query.cleared
 * @param {(found: Set<number> | null) => void} query.listing
 */
export function tree(data, mesh, selection, { find, cleared, listing }) {
  /** @type {{ bySize: boolean, found: Set<number> | null, opened: Set<string> }} */
  const state = { bySize: false, found: null, opened: new Set() };
  const shut = { all: new Set(), found: new Set() }; // a new query opens what it found
  const preset = defaultLeaf(data);
  const id = uniqueId("tree");
  const top = h("div", {
    class: "jsm-tree-top jsm-tree-role",
    "aria-hidden": "true",
    onclick: () => onTop && toggle(onTop),
  });
  const space = h("div", { class: "jsm-tree-space", role: "none" });
  const box = h(
    "div",
    {
      class: "jsm-tree",
      role: "tree",
      tabindex: 0,
      "aria-label": "Leaves of the step",
      ...OWN_KEYS,
      onkeydown: key,
      onscroll: draw,
      onfocus: told,
      onblur: told,
      onclick: press,
    },
    top,
    space,
  );
  /** @type {string[]} */
  let words = [];
  /** @type {Row[]} */
  let rows = [];
  let largest = 1;
  /** @type {string | null} */
  let active = null; // the key of the row that the keyboard is on
  /** @type {Row | null} */
  let onTop = null; // the header above the first row in view
  let own = false; // the change of leaf comes from here
  let hidden = true;

  const nameOf = (/** @type {Row} */ row) => `${id}-${row.key.replaceAll(" ", "-")}`;
  const view = viewport(box, space, rowMaker(data, mesh), (slot, row, from) => {
    slot.fill(row, { id: nameOf(row), top: from, largest, words });
    mark(slot, row);
  });

  const chosen = () => selection.leaf ?? preset;
  const marks = (/** @type {Row} */ row) =>
    row.kind !== "role" && !(row.open && row.kind === "family") && row.leaves.includes(chosen() ?? -1);
  const focused = () => box.matches(":focus");
  const closed = () => (state.found === null ? shut.all : shut.found);

  function list() {
    rows = listed(data, { ...state, shut: closed() });
    largest = rows.reduce((most, row) => (row.kind === "role" ? most : Math.max(most, row.held)), 1);
    view.list(rows);
    box.hidden = !rows.length;
    if (view.place(active) < 0) active = (rows.find(marks) ?? rows[0])?.key ?? null;
    listing(state.found);
    told();
  }

  function draw() {
    const above = view.draw(focused() ? active : null); // what aria-activedescendant names must be in the page
    top.hidden = above === null;
    if (above !== onTop && above) replace(top, roleNodes(above));
    onTop = above;
  }

  /**
   * @param {{ element: HTMLElement }} slot
   * @param {Row} row
   */
  function mark(slot, row) {
    slot.element.setAttribute("aria-selected", String(marks(row)));
    slot.element.classList.toggle("jsm-active", row.key === active);
  }

  /** Which rows are chosen and which one the keyboard is on. */
  function told() {
    draw();
    view.each(mark);
    const row = focused() ? rows[view.place(active)] : null;
    if (row) box.setAttribute("aria-activedescendant", nameOf(row));
    else box.removeAttribute("aria-activedescendant");
  }

  /** @param {MouseEvent} event */
  function press(event) {
    const target = /** @type {Element} */ (event.target);
    const row = view.rowOf(target);
    if (!row) return;
    if (row.kind === "role" || target.closest(".jsm-twist")) toggle(row);
    else choose(row);
  }

  /** @param {Row} row */
  function toggle(row) {
    const keys = row.kind === "role" ? closed() : state.opened;
    if (!keys.delete(row.key)) keys.add(row.key);
    active = row.key;
    list();
    view.reveal(active);
  }

  /** @param {Row} row */
  function choose(row) {
    active = row.key;
    own = true;
    if (row.kind !== "role" && !row.leaves.includes(selection.leaf ?? -1)) selection.select({ leaf: row.leaves[0] });
    own = false;
    view.reveal(active);
    told();
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    const at = view.place(active);
    const row = rows[at];
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(box.clientHeight / HEIGHT.leaf) - 2);
    /** @type {Record<string, number>} */
    const steps = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      Home: 0,
      End: rows.length - 1,
      PageDown: at + page,
      PageUp: at - page,
    };
    if (event.key in steps) choose(rows[Math.max(0, Math.min(rows.length - 1, steps[event.key]))]);
    else if (event.key === "ArrowRight") row.open === false ? toggle(row) : row.open && choose(rows[at + 1]);
    else if (event.key === "ArrowLeft") row.open ? toggle(row) : choose(parent(at) ?? row);
    else if (event.key === "Enter" || event.key === " ") row.open === null ? choose(row) : toggle(row);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  const parent = (/** @type {number} */ at) => rows.slice(0, at).findLast((above) => above.level < rows[at].level);

  /** Bring the leaf that was chosen elsewhere into view, opening what hides it. */
  function follow(keepsQuery = false) {
    const leaf = chosen();
    const found = leaf === null || (state.found?.has(leaf) ?? true);
    if (leaf === null || (!found && keepsQuery)) return draw();
    if (!found) {
      cleared();
      show({ query: "" });
    }
    closed().delete(`role ${data.leaves.role[leaf]}`);
    const at = data.rows.findIndex(([, , leaves]) => leaves.indexOf(leaf) > 0); // the first stands for its family
    if (at >= 0) state.opened.add(`family ${at}`);
    list();
    active = rows.find(marks)?.key ?? active;
    view.reveal(active);
    told();
  }

  /** @param {{ query?: string, bySize?: boolean }} change */
  function show({ query, bySize = state.bySize }) {
    if (query !== undefined) {
      words = wordsOf(query);
      state.found = find(query);
      shut.found.clear();
    }
    state.bySize = bySize;
    box.scrollTop = 0;
    list();
    if (query === "") view.reveal(active);
  }

  /** A leaf that was chosen while this view was hidden is brought into view when it is shown again. */
  function resized() {
    const shown = box.clientHeight > 0;
    if (shown && hidden) follow(true);
    else draw();
    hidden = !shown;
  }

  selection.on(({ leaf }) => leaf && !own && follow());
  new ResizeObserver(resized).observe(box);
  scrollsOn(box);
  list();
  return { element: box, show, focus: () => box.focus() };
}
