// What stands under the views: where the figures come from, and the leaves that only rounding moves. A payload that an
// earlier version saved has neither.

import { h } from "../shared/dom.js";
import { named } from "./check.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Selection } from "../shared/selection.js" */

const MOST = 3; // leaves that a sentence names

/**
 * The foot of a report; null where it has nothing to say.
 *
 * @param {Sent.Report} data
 * @param {Selection} selection
 */
export function foot(data, selection) {
  const noise = named(data.check?.noise, MOST, data, selection);
  const told = data.foot ?? [];
  if (!told.length && !noise.length) return null;
  const notes = told.length ? h("p", { class: "jsm-small jsm-quiet" }, told.join(" ")) : null;
  return h("div", { class: "jsm-foot", role: "group", "aria-label": "Notes" }, notes, noise);
}
