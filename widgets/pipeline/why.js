// What the bubble is made of, as one bar and its legend.

import { h } from "../shared/dom.js";
import { percent } from "./say.js";

/** @import * as Sent from "../shared/payload_types.js" */

const OPACITY = [1, 0.7, 0.45];

/** @type {Record<string, string>} */
const SAYS = {
  "the schedule": "Idle even if all stages took the same time and results were with the next rank at once",
  "uneven stages": "What the stages' own times add: the others wait for the slowest",
  transfers: "What the time adds that activations and their gradients take from rank to rank",
  "not explained": "What the run took beyond all that is predicted",
};

/**
 * The bar of `parts`, [what, share, text, more] each, and a legend where there is more than one.
 *
 * @param {Sent.Pipeline} pipeline
 */
export function why({ parts, bubble, work }) {
  const named = `The bubble, ${percent(bubble)}: ${parts.map(([what, , text]) => `${what} ${text}`).join(", ")}`;
  return h(
    "div",
    { class: "jsm-pp-why" },
    h(
      "div",
      { class: "jsm-pp-bar", role: "img", "aria-label": named },
      pieces(parts, bubble).map(({ share, look }) => h("i", { style: { ...look, width: `${100 * share}%` } })),
      h("span", { class: "jsm-quiet" }, `${work ?? percent(1 - bubble)} of device time is work`),
    ),
    h(
      "div",
      { class: "jsm-pp-parts" },
      parts.map(([what, share, text, more], i) =>
        h(
          "span",
          { title: SAYS[what] },
          h("i", { class: "jsm-key", style: lookOf(what, share, i) }),
          h("b", {}, text),
          ` ${what}`,
          more ? ` (${more})` : null,
        ),
      ),
    ),
  );
}

/**
 * What fills the bar up to the bubble; a part below 0 takes from those before it, and stands hollow behind them.
 *
 * @param {Sent.Pipeline["parts"]} parts
 * @param {number} bubble
 */
function pieces(parts, bubble) {
  let room = bubble;
  const found = [];
  parts.forEach(([what, share], i) => {
    const size = Math.max(0, Math.min(share, room));
    room -= size;
    if (size > 0) found.push({ share: size, look: lookOf(what, share, i) });
  });
  const less = parts.findIndex(([, share]) => share < 0);
  if (less >= 0) found.push({ share: -parts[less][1], look: lookOf(parts[less][0], -1, less) });
  return found;
}

/**
 * @param {string} what
 * @param {number} share
 * @param {number} i
 */
function lookOf(what, share, i) {
  if (share < 0) return { outline: "1px dashed var(--jsm-ink-3)", outlineOffset: "-1px" };
  if (what !== "not explained") return { background: "var(--jsm-ink-3)", opacity: OPACITY[i] ?? 0.45 };
  const lines = "repeating-linear-gradient(135deg, var(--jsm-ink-3) 0 1px, transparent 1px 4px)";
  return { background: lines, outline: "1px solid var(--jsm-ink-3)", outlineOffset: "-1px" };
}
