// One row of the list, as an element that becomes another row when the list scrolls.

import { h, replace } from "../shared/dom.js";
import { bytes, count, counted } from "../shared/format.js";
import { leafAt, withinOf } from "../shared/mesh.js";
import { axis, bytesNodes, placed, sign, specText, typed } from "../shared/text.js";
import { glyph } from "./glyph.js";
import { pathNodes } from "./path.js";
import { lost } from "./rows.js";
import { marked } from "./search.js";

/** @import { Leaf } from "../shared/mesh.js" */
/** @import { LeafList, Row } from "./rows.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @typedef {{ id: string, top: number, largest: number, words: string[] }} Given */

const BAR = 34; // px of the largest

/**
 * What stands in the header of a role.
 *
 * @param {Row} row
 */
export const roleNodes = (row) => [
  twist(row),
  h("span", {}, h("b", {}, row.role), " ", h("span", { class: "jsm-small jsm-quiet" }, counts(row))),
  h("span", { class: "jsm-small" }, bytesNodes(row.held), " per device", row.uneven ? " at most" : null),
];

/** @param {Row} row */
const counts = ({ leaves }) => counted(leaves.length, "leaf", "leaves");

/**
 * Elements for rows. `make()` gives `{element, fill(row, {id, top, largest, words})}`; `fill` makes it that row. A
 * glyph is drawn once for all leaves that are cut alike, a type once for all of that type.
 *
 * @param {LeafList} data
 * @param {Mesh} mesh
 */
export function rowMaker(data, mesh) {
  const failed = new Set(data.failed);
  const glyphOf = copied(
    (leaf) => glyph(leaf),
    (leaf) => `${leaf.shape.length} ${leaf.spec.join("|")} ${leaf.sizes}`,
  );
  const typeOf = copied(
    (leaf) => typed(mesh, leaf),
    (leaf) => `${leaf.dtype} ${leaf.shape} ${leaf.spec.join("|")}`,
  );

  /**
   * @param {Row} row
   * @param {Leaf} leaf
   */
  function typeNode(row, leaf) {
    const node = typeOf(leaf);
    const place = placed(mesh, withinsOf(row, data), true);
    if (leaf.within.length && place) node.append(" ", place);
    return node;
  }

  return function make() {
    const path = h("span", { class: "jsm-path" });
    const held = h("span", { class: "jsm-held" });
    const bar = h("span", { class: "jsm-tree-bar" });
    const element = h("div", { role: "treeitem" });

    /**
     * @param {Row} row
     * @param {Leaf} leaf
     * @param {Given} given
     */
    function leafNodes(row, leaf, { largest, words }) {
      replace(path, h("span", {}, twist(row), pathNodes(row, words), signs(row, leaf, failed)), times(row));
      replace(held, bytesNodes(row.held));
      bar.style.width = `${row.held && Math.max(0.75, (BAR * row.held) / largest)}px`;
      return [
        glyphOf(leaf),
        path,
        marked(typeNode(row, leaf), words),
        held,
        bar,
        row.told ? told(data, mesh, row, leaf) : null,
      ];
    }

    /**
     * @param {Row} row
     * @param {Given} given
     */
    function fill(row, given) {
      const leaf = row.kind === "role" ? null : leafAt(data, row.leaves[0]);
      element.id = given.id;
      element.className = `jsm-tree-row jsm-tree-${row.kind} jsm-level-${row.level}`;
      element.style.transform = `translateY(${given.top}px)`;
      element.style.height = `${row.height}px`;
      element.setAttribute("aria-level", String(row.level));
      element.setAttribute("aria-posinset", String(row.index + 1));
      element.setAttribute("aria-setsize", String(row.of));
      if (row.open === null) element.removeAttribute("aria-expanded");
      else element.setAttribute("aria-expanded", String(row.open));
      if (leaf) element.title = spoken(row, leaf, data, mesh);
      else element.removeAttribute("title");
      replace(element, leaf ? leafNodes(row, leaf, given) : roleNodes(row));
    }

    return { element, fill };
  };
}

/**
 * `make(leaf)` once for each `key(leaf)`, and copies of that.
 *
 * @template {Element} Made
 * @param {(leaf: Leaf) => Made} make
 * @param {(leaf: Leaf) => string} key
 */
function copied(make, key) {
  /** @type {Map<string, Made>} */
  const made = new Map();
  return (/** @type {Leaf} */ leaf) => {
    const name = key(leaf);
    const first = made.get(name) ?? make(leaf);
    made.set(name, first);
    return /** @type {Made} */ (first.cloneNode(true));
  };
}

/**
 * @param {Row} row
 * @param {LeafList} data
 */
const withinsOf = (row, data) => row.leaves.map((leaf) => withinOf(data, leaf));

/**
 * All of the row as text, for a hover.
 *
 * @param {Row} row
 * @param {Leaf} leaf
 * @param {LeafList} data
 * @param {Mesh} mesh
 */
function spoken(row, leaf, data, mesh) {
  const each = row.leaves.length > 1 ? `, ${count(row.leaves.length)} leaves of ${bytes(leaf.held)}` : "";
  const names = leaf.short?.wanted.map((index) => mesh.names[index]).join(" and ");
  const short = leaf.short ? `\nnot cut over ${names}: +${bytes(lost(data, row))} per device` : "";
  const place = placed(mesh, withinsOf(row, data));
  return `${row.path}  ${specText(mesh, leaf)}${place ? ` ${place.textContent}` : ""}\n${bytes(row.held)} per device${each}${short}`;
}

/** @param {Row} row */
const twist = ({ open }) =>
  open === null ? null : h("span", { class: "jsm-twist", "aria-hidden": "true" }, open ? "\u25bc" : "\u25b6");

/** @param {Row} row */
const times = ({ leaves }) =>
  leaves.length > 1 ? h("span", { class: "jsm-times jsm-quiet" }, `\u00d7${count(leaves.length)}`) : null;

/**
 * @param {Row} row
 * @param {Leaf} leaf
 * @param {Set<number>} failed
 */
const signs = (row, leaf, failed) => [
  leaf.short && !row.told ? sign("warning", "not cut as wanted") : null,
  row.leaves.some((each) => failed.has(each)) ? sign("error", "its numbers differ") : null,
];

/**
 * The line below a parameter that is not cut as wanted; "per device", then the reason give way.
 *
 * @param {LeafList} data
 * @param {Mesh} mesh
 * @param {Row} row
 * @param {Leaf} leaf
 */
function told(data, mesh, row, leaf) {
  const over = leaf.short.wanted.flatMap((index, i) => [i ? " and " : " over ", axis(mesh, index)]);
  const more = lost(data, row);
  const reason = leaf.why ? `: ${leaf.why.split("; ")[0]}` : null;
  const cost = more ? h("span", { class: "jsm-told-cost" }, "; ", h("b", {}, `+${bytes(more)}`)) : null;
  const first = h(
    "span",
    {},
    sign("warning", "warning"),
    h("span", { class: "jsm-told-why" }, "not cut", over, reason),
    cost,
  );
  return h("span", { class: "jsm-told" }, first, cost ? h("span", {}, " per device") : null);
}
