// The list of leaves. Only the rows in view are in the page, so that thousands scroll as ten do.

import { h, replace, uniqueId } from "../shared/dom.js";
import { leafRow, roleRow, spoken } from "./row.js";
import { defaultLeaf, listed } from "./rows.js";
import { wordsOf } from "./search.js";

const BEYOND = 8; // rows kept above and below those in view

/**
 * The tree, and `show({query, bySize})` to change what it lists. `cleared()` is called when a leaf that was chosen
 * elsewhere is hidden by the query; `listing(found)` with the set of leaves listed, null for all.
 */
export function tree(data, mesh, selection, { find, cleared, listing }) {
  const state = { bySize: false, shut: new Set(), opened: new Set(), found: null };
  const failed = new Set(data.failed);
  const preset = defaultLeaf(data);
  const id = uniqueId("tree");
  const rowsInPage = new Map();
  const top = h("div", { class: "jsm-tree-top jsm-tree-role", "aria-hidden": "true", onclick: () => press(topRow()) });
  const space = h("div", { class: "jsm-tree-space", role: "none" });
  const box = h(
    "div",
    { class: "jsm-tree", role: "tree", tabindex: 0, "aria-label": "Leaves of the step", onkeydown: key, onscroll: draw },
    top,
    space,
  );
  let query = "";
  let rows = [];
  let starts = [0]; // px at which each row begins, and the end of the last
  let active = null; // the key of the row that the keyboard is on
  let own = false; // the change of leaf comes from here
  let largest = 1;

  const chosen = () => selection.leaf ?? preset;
  const marks = (row) => row.kind !== "role" && !(row.open && row.kind === "family") && row.leaves.includes(chosen());
  const place = (rowKey) => rows.findIndex((row) => row.key === rowKey);
  const topRow = () => rows[before(starts, box.scrollTop)] && rows.findLast((row, i) => row.kind === "role" && starts[i] <= box.scrollTop);

  function list() {
    rows = listed(data, state);
    starts = [0];
    for (const row of rows) starts.push(starts.at(-1) + row.height);
    largest = rows.reduce((most, row) => (row.kind === "role" ? most : Math.max(most, row.held)), 1);
    space.style.height = `${starts.at(-1)}px`;
    box.style.setProperty("--jsm-tree-height", `${starts.at(-1) + 1}px`);
    for (const node of rowsInPage.values()) node.remove();
    rowsInPage.clear();
    if (place(active) < 0) active = rows.find(marks)?.key ?? rows[0]?.key ?? null;
    listing(state.found);
    draw();
  }

  function draw() {
    const from = Math.max(0, before(starts, box.scrollTop) - BEYOND);
    const to = Math.min(rows.length, before(starts, box.scrollTop + box.clientHeight) + 1 + BEYOND);
    const wanted = new Map(rows.slice(from, to).map((row, i) => [row.key, from + i]));
    const at = place(active);
    if (at >= 0) wanted.set(active, at); // what aria-activedescendant names must be there
    for (const [rowKey, node] of rowsInPage) {
      if (!wanted.has(rowKey)) {
        node.remove();
        rowsInPage.delete(rowKey);
      }
    }
    for (const [rowKey, i] of wanted) if (!rowsInPage.has(rowKey)) rowsInPage.set(rowKey, space.appendChild(made(rows[i], i)));
    mark();
    const header = topRow();
    top.hidden = !header;
    if (header && top.dataset.key !== `${header.key} ${header.open}`) {
      top.dataset.key = `${header.key} ${header.open}`;
      replace(top, roleRow(header));
    }
  }

  function made(row, at) {
    const attributes = {
      class: `jsm-tree-row jsm-tree-${row.kind} jsm-level-${row.level}`,
      id: `${id}-${row.key.replaceAll(" ", "-")}`,
      role: "treeitem",
      "aria-level": row.level,
      "aria-posinset": row.index + 1,
      "aria-setsize": row.of,
      "aria-expanded": row.open === null ? null : String(row.open),
      title: row.kind === "role" ? null : spoken(row, data, mesh),
      style: { transform: `translateY(${starts[at]}px)`, height: `${row.height}px` },
      onclick: (event) => press(row, event),
    };
    const words = wordsOf(query);
    return h("div", attributes, row.kind === "role" ? roleRow(row) : leafRow(row, data, mesh, { largest, words, failed }));
  }

  /** Which rows are chosen and which one the keyboard is on. */
  function mark() {
    for (const [rowKey, node] of rowsInPage) {
      const row = rows[place(rowKey)];
      node.setAttribute("aria-selected", String(Boolean(row) && marks(row)));
      node.classList.toggle("jsm-active", rowKey === active);
    }
    if (active === null) box.removeAttribute("aria-activedescendant");
    else box.setAttribute("aria-activedescendant", `${id}-${active.replaceAll(" ", "-")}`);
  }

  function press(row, event) {
    if (!row) return;
    const onTwist = event?.target.closest?.(".jsm-twist");
    if (row.kind === "role" || onTwist) toggle(row);
    else choose(row);
  }

  function toggle(row) {
    const keys = row.kind === "role" ? state.shut : state.opened;
    if (!keys.delete(row.key)) keys.add(row.key);
    active = row.key;
    list();
    reveal(place(active));
  }

  function choose(row) {
    active = row.key;
    own = true;
    if (row.kind !== "role" && !row.leaves.includes(selection.leaf)) selection.select({ leaf: row.leaves[0] });
    own = false;
    reveal(place(active));
    draw();
  }

  function reveal(at) {
    if (at < 0 || !box.clientHeight) return;
    const header = rows[at].kind === "role" ? 0 : rows.find((row) => row.kind === "role").height;
    if (starts[at] < box.scrollTop + header) box.scrollTop = starts[at] - header;
    else if (starts[at + 1] > box.scrollTop + box.clientHeight) box.scrollTop = starts[at + 1] - box.clientHeight;
  }

  function key(event) {
    const at = place(active);
    const row = rows[at];
    const page = Math.max(1, Math.floor(box.clientHeight / 22) - 2);
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + page, PageUp: at - page };
    if (event.key in steps) choose(rows[Math.max(0, Math.min(rows.length - 1, steps[event.key]))]);
    else if (event.key === "ArrowRight" && row?.open === false) toggle(row);
    else if (event.key === "ArrowRight" && row?.open) choose(rows[at + 1] ?? row);
    else if (event.key === "ArrowLeft" && row?.open) toggle(row);
    else if (event.key === "ArrowLeft" && row) choose(rows.slice(0, at).findLast((above) => above.level < row.level) ?? row);
    else if (["Enter", " "].includes(event.key) && row) row.open === null ? choose(row) : toggle(row);
    else return;
    event.preventDefault();
  }

  /** Bring the leaf that was chosen elsewhere into view, opening what hides it. */
  function follow() {
    const leaf = chosen();
    if (leaf === null) return;
    if (state.found !== null && !state.found.has(leaf)) {
      show({ query: "" });
      cleared();
    }
    const hiding = data.rows.findIndex(([, , leaves]) => leaves.length > 1 && leaves.indexOf(leaf) > 0);
    const opened = hiding >= 0 && state.found === null && !state.opened.has(`family ${hiding}`);
    if (opened) state.opened.add(`family ${hiding}`);
    if (state.shut.delete(`role ${data.leaves.role[leaf]}`) || opened) list();
    active = rows.find(marks)?.key ?? active;
    reveal(place(active));
    draw();
  }

  function show(changes) {
    query = changes.query ?? query;
    state.bySize = changes.bySize ?? state.bySize;
    state.found = find(query);
    box.scrollTop = 0;
    list();
  }

  selection.on(({ leaf }) => leaf && !own && follow());
  new ResizeObserver(() => draw()).observe(box);
  list();
  requestAnimationFrame(follow);
  return { element: box, show, focus: () => box.focus() };
}

/** The last row that begins at or before `y`. */
function before(starts, y) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= y) low = middle;
    else high = middle - 1;
  }
  return low;
}
