// The options of the line, each beside the step compiled without it.

import { h } from "../shared/dom.js";

/** @import * as Sent from "../shared/payload_types.js" */

/**
 * A table of the step as it is and of each change; nothing where the line has no such options.
 *
 * @param {Sent.Options | null} found
 */
export function options(found) {
  if (!found) return null;
  const heads = found.heads.map(([name, hover]) => h("th", { scope: "col", class: "jsm-num", title: hover }, name));
  const named = { class: "jsm-table", "aria-label": found.title };
  return h(
    "div",
    { class: "jsm-options" },
    h("h3", {}, found.title),
    h("table", named, h("thead", {}, h("tr", {}, h("td", {}), heads)), h("tbody", {}, found.rows.map(row))),
    found.why.map((line) => h("p", { class: "jsm-small jsm-quiet" }, line)),
  );
}

/**
 * @param {Sent.Options["rows"][number]} options
 * @param {number} i
 */
function row([change, values, shares], i) {
  const name = i ? h("code", {}, change) : change;
  const cells = values.map((value, k) =>
    h("td", { class: "jsm-num" }, value, h("span", { class: "jsm-options-share jsm-quieter" }, shares[k])),
  );
  return h("tr", {}, h("td", {}, name), cells);
}
