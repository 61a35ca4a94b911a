// Sharding layouts: the leaves on the left, the chosen one on the right.

import { h, replace } from "../shared/dom.js";
import { figures } from "../shared/figures.js";
import { count, counted } from "../shared/format.js";
import { detail } from "./detail.js";
import { searcher } from "./search.js";
import { tree } from "./tree.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

/**
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
export function view(data, mesh, selection) {
  const all = data.leaves.path.length;
  if (!all) return h("p", { class: "jsm-lead" }, "This step takes no arrays.");
  const shown = h("span", { class: "jsm-small jsm-quiet", role: "status" });
  const none = h("p", { class: "jsm-small jsm-quiet jsm-no-leaf" });
  const filter = h("input", {
    type: "search",
    class: "jsm-filter",
    placeholder: "Filter: mlp, 3072, @model, warn",
    title:
      "Words that must all stand in a leaf's path, type (3072, bf16, @model), stage (pipe=2) or role; warn: not cut as wanted; differs: other numbers than the plain step's",
    "aria-label": "Filter leaves",
    oninput: () => leaves.show({ query: filter.value }),
    onkeydown: key,
  });
  const leaves = tree(data, mesh, selection, {
    find: searcher(data, mesh),
    cleared: () => (filter.value = ""),
    listing,
  });
  const orders = ["tree", "size"].map((order) => orderButton(order));

  /** @param {Set<number> | null} found */
  function listing(found) {
    replace(
      shown,
      found === null ? counted(all, "leaf", "leaves") : `${count(found.size)} of ${counted(all, "leaf", "leaves")}`,
    );
    none.hidden = found === null || found.size > 0;
    if (!none.hidden) {
      const clear = h("button", { type: "button", class: "jsm-link", onclick: clearFilter }, "Clear");
      replace(none, `No leaf matches \u201c${filter.value}\u201d. `, clear);
    }
  }

  function clearFilter() {
    filter.value = "";
    leaves.show({ query: "" });
    filter.focus();
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    if (event.key === "Escape" && filter.value) clearFilter();
    else if (event.key === "ArrowDown") leaves.focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** @param {string} order */
  function orderButton(order) {
    const press = () => {
      leaves.show({ bySize: order === "size" });
      for (const button of orders) button.setAttribute("aria-pressed", String(button.textContent === order));
    };
    return h("button", { type: "button", "aria-pressed": String(order === "tree"), onclick: press }, order);
  }

  const tools = h(
    "div",
    { class: "jsm-tools" },
    filter,
    h("div", { class: "jsm-orders", role: "group", "aria-label": "Order" }, orders),
    shown,
  );
  return h(
    "div",
    {},
    h(
      "div",
      { class: "jsm-layout" },
      h("div", { class: "jsm-leaves" }, tools, none, leaves.element),
      detail(data, mesh, selection),
    ),
    figures(data.figures_of?.layout),
  );
}
