// A pipeline in time: its bubble, what that is made of, what ran when on each rank, and what else could be.

import { h } from "../shared/dom.js";
import { spans } from "../shared/text.js";
import { Events } from "./events.js";
import { Lanes } from "./lanes.js";
import { WIDE } from "./plan.js";
import { NAMES } from "./say.js";
import { WhatIf } from "./whatif.js";
import { why } from "./why.js";

const TOOK = "From the first start to the last end of a step";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Plan } from "./plan.js" */
/** @import { PipelineAlone } from "../shared/payload_types.js" */

/** @param {Pick<PipelineAlone, "pipeline">} data */
export function view({ pipeline }) {
  const events = new Events(pipeline);
  const lanes = new Lanes(pipeline, events);
  const panel = pipeline.what_if.length ? new WhatIf(pipeline) : null;
  const about = h("span", { class: "jsm-quiet", title: TOOK }, pipeline.about);
  const element = h(
    "div",
    { class: "jsm-pipeline" },
    h("p", { class: "jsm-lead" }, spans(pipeline.lead, { names: [] }), " ", about),
    why(pipeline),
    legend(pipeline, lanes.plan),
    lanes.element,
    panel?.element,
  );
  follow(element, () => lanes.fit());
  return element;
}

/**
 * Call `fit` when the width or the theme of the page has changed.
 *
 * @param {HTMLElement} element
 * @param {() => void} fit
 */
export function follow(element, fit) {
  let width = 0;
  /** @type {MutationObserver | undefined} */
  let watched;
  new ResizeObserver(([{ contentRect }]) => {
    if (!contentRect.width || contentRect.width === width) return;
    width = contentRect.width;
    element.classList.toggle("jsm-narrow", width < WIDE);
    if (!watched) {
      watched = new MutationObserver(fit);
      watched.observe(/** @type {Element} */ (element.closest(".jsm")), {
        attributes: true,
        attributeFilter: ["data-theme"],
      });
    }
    fit();
  }).observe(element);
}

/** @type {Record<string, number[]>} */
const EDGES = { F: [], B: [2.5, -2.5], I: [2.5], W: [-2.5] };

/**
 * @param {Sent.Pipeline} pipeline
 * @param {Plan} plan
 */
function legend({ kinds, source }, { ideal, held }) {
  const key = (/** @type {string} */ kind) => {
    const edges = EDGES[kind].map((px) => `inset 0 ${px}px 0 rgba(20, 23, 26, 0.6)`).join(", ");
    const look = { background: `var(--jsm-${kind})`, boxShadow: edges || null };
    return h("span", {}, h("i", { class: "jsm-key", style: look }), `${kind} ${NAMES[kind]}`);
  };
  const lanes = ideal ? `upper lane ${source}, lower lane ideal` : source;
  return h(
    "div",
    { class: "jsm-pp-legend" },
    kinds.map(key),
    h(
      "span",
      { title: "A rank has nothing to do that it could start" },
      h("i", { class: "jsm-key jsm-pp-hatch" }),
      "bubble",
    ),
    h("span", { class: "jsm-pp-lanes" }, held ? `${lanes}; line: activations held` : lanes),
  );
}
