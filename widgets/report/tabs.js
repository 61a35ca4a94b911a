// Tabs with one number each; a view is made when it is first shown and kept.

import { h, uniqueId } from "../shared/dom.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Selection } from "../shared/selection.js" */

/** @type {Record<string, number>} */
const STEPS = { ArrowRight: 1, ArrowLeft: -1 };

/**
 * A tab list and the panel of the chosen tab; `make(id)` draws a view, `beside(chosen)` makes what stands beside the
 * list.
 *
 * @param {Sent.Tab[]} listed
 * @param {Selection} selection
 * @param {(id: Sent.TabId) => Element} make
 * @param {(chosen: () => string) => Element} beside
 */
export function tabs(listed, selection, make, beside) {
  const panels = new Map();
  const buttons = new Map(listed.map((tab) => [tab.id, button(tab, selection)]));
  const list = h("div", { class: "jsm-tabs", role: "tablist", "aria-label": "Views of this report", onkeydown: move }, [
    ...buttons.values(),
  ]);
  const place = h("div", { class: "jsm-panels" });

  /** @param {KeyboardEvent} event */
  function move(event) {
    const ids = listed.map((tab) => tab.id);
    const at = ids.indexOf(chosen());
    const to = { Home: 0, End: ids.length - 1 }[event.key] ?? at + (STEPS[event.key] ?? NaN);
    if (!(to in ids)) return;
    event.preventDefault();
    selection.select({ tab: ids[to] });
    buttonOf(ids[to]).focus();
  }

  const chosen = () => (listed.find(({ id }) => id === selection.tab) ?? listed[0]).id;
  const buttonOf = (/** @type {Sent.TabId} */ id) => /** @type {HTMLElement} */ (buttons.get(id));

  function show() {
    const id = chosen();
    if (!panels.has(id)) {
      const panel = h("div", { role: "tabpanel", id: uniqueId("panel"), "aria-labelledby": buttonOf(id).id });
      panels.set(id, panel);
      place.append(panel);
      panel.append(make(id));
      buttonOf(id).setAttribute("aria-controls", panel.id);
    }
    for (const [other, node] of buttons) {
      node.setAttribute("aria-selected", String(other === id));
      node.tabIndex = other === id ? 0 : -1;
    }
    for (const [other, panel] of panels) panel.hidden = other !== id;
  }

  selection.on(({ tab }) => tab && show());
  show();
  return h("div", {}, h("div", { class: "jsm-tabs-row" }, list, beside(chosen)), place);
}

/**
 * @param {Sent.Tab} tab
 * @param {Selection} selection
 */
function button({ id, label, number }, selection) {
  const attributes = { type: "button", role: "tab", id: uniqueId("tab"), class: "jsm-tab" };
  return h(
    "button",
    { ...attributes, onclick: () => selection.select({ tab: id }) },
    label,
    number ? [" ", h("span", { class: "jsm-tab-number" }, number)] : null,
  );
}
