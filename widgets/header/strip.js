// The predicted step as one bar: what a device does itself, then each kind of collective over its axes.

import { h, replace, s } from "../shared/dom.js";
import { seconds, share } from "../shared/format.js";
import { over, overText, pieces, SEAM } from "../shared/kinds.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @typedef {{ kind: string, axes: number[] | null, took: string, own: boolean, part: number }} Part */

const BAR = 12; // px
const AWAY = 6; // px between a label and the next part
const LEAST = 0.01; // of the step: a smaller part is told in the communication view alone
const NAMED = 3; // parts told in words that have no label

/** @type {Record<string, string>} */
const OWN = {
  compute: "Compute: the products whose arithmetic takes longer than reading and writing their bytes",
  memory: "Memory: the products that wait for the chip's memory, and the update",
};
const RANGE =
  "From products at the chip's peak and all overlapped that can be, to products as far from it as they were seen and" +
  " nothing overlapped";

/** @type {Record<string, number>} */
const FILLED = { compute: 1, memory: 0.6 };

/**
 * The bar of a payload's `time` with its labels; nothing for none.
 *
 * @param {Sent.PredictedTime | null} time
 * @param {Mesh} mesh
 */
export function timeStrip(time, mesh) {
  if (!time) return null;
  const own = time.own ?? 1; // an earlier version saved one part of its own, without a name
  const parts = time.parts.map(([kind, axes, spent, took], i) => {
    const part = time.total ? spent / time.total : 0;
    return { kind: kind ?? "compute", axes, took: took ?? seconds(spent), own: i < own, part };
  });
  const labels = parts.map((each) => label(each, mesh));
  const place = h("div", { class: "jsm-strip-labels" }, labels);
  const rest = h("p", { class: "jsm-small jsm-quiet", hidden: true });
  const element = h(
    "div",
    { class: "jsm-strip" },
    bar(parts, mesh, time.text),
    place,
    rest,
    time.range ? h("p", { class: "jsm-small jsm-quiet", title: RANGE }, `${time.text}, from ${time.range}`) : null,
  );
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    if (!contentRect.width || contentRect.width === width) return;
    width = contentRect.width;
    const without = fitted(parts, labels, width);
    rest.hidden = !without.length;
    replace(rest, also(without, mesh));
  }).observe(element);
  return element;
}

/**
 * @param {Part[]} parts
 * @param {Mesh} mesh
 * @param {string} text
 */
function bar(parts, mesh, text) {
  const told = parts.map((each) => `${named(each, mesh)} ${share(each.part)}, ${each.took}`);
  const label = `Predicted step of ${text}: ${told.join("; ")}`;
  let from = 0;
  const own = parts
    .filter((each) => each.own)
    .map(({ kind, part }) => {
      const x = `${from}%`;
      from += 100 * part;
      return [
        s("rect", { x, width: `${100 * part}%`, height: BAR, fill: "var(--jsm-compute)", opacity: FILLED[kind] }),
        s("rect", { x, width: `${100 * part}%`, y: BAR - 1, height: 1, fill: "var(--jsm-compute)" }),
        seam(from),
      ];
    });
  const rest = within(parts.filter((each) => !each.own));
  const moved = s("svg", { x: `${from}%`, width: `${Math.max(0, 100 - from)}%`, height: BAR }, rest);
  return s(
    "svg",
    { width: "100%", height: BAR, role: "img", "aria-label": label },
    s("title", {}, told.join("\n")),
    moved,
    own,
  );
}

/** @param {number} at */
const seam = (at) => at > 0 && at < 100 && s("rect", { x: `${at}%`, width: SEAM, height: BAR, fill: "var(--jsm-bg)" });

/**
 * The collectives, as shares of all of them.
 *
 * @param {Part[]} parts
 */
function within(parts) {
  const all = parts.reduce((sum, { part }) => sum + part, 0) || 1;
  return pieces(
    parts.map(({ kind, axes, part }) => ({ kind, axes, size: (100 * part) / all })),
    BAR,
  );
}

/**
 * @param {Part} part
 * @param {Mesh} mesh
 */
const named = ({ kind, axes, own }, mesh) => (own ? kind : `${kind} over ${overText(axes, null, mesh)}`);

/**
 * @param {Part} part
 * @param {Mesh} mesh
 */
function label({ kind, axes, took, part, own }, mesh) {
  const what = own ? null : [over(axes, null, mesh), " "];
  return h(
    "div",
    { class: "jsm-strip-label", title: own ? OWN[kind] : null },
    h("div", { class: "jsm-strip-kind" }, kind),
    h("div", { class: "jsm-quiet" }, what, share(part), h("span", { class: "jsm-strip-time" }, ` ${took}`)),
  );
}

/**
 * Put each label under its part, without its time where that is too wide; returns the parts that have no room.
 *
 * @param {Part[]} parts
 * @param {HTMLElement[]} labels
 * @param {number} width
 */
function fitted(parts, labels, width) {
  let at = 0;
  return parts.filter(({ part }, i) => {
    const node = labels[i];
    node.style.left = `${100 * at}%`;
    at += part;
    const room = part * width - (i < parts.length - 1 ? AWAY : 0);
    const fits = (/** @type {boolean} */ timed) => {
      node.classList.toggle("jsm-untimed", !timed);
      return node.offsetWidth <= room;
    };
    node.hidden = false;
    node.hidden = !fits(true) && !fits(false);
    return node.hidden && part >= LEAST;
  });
}

/**
 * `also all-to-all over data 0.6%, 278 us`: parts too small for a label.
 *
 * @param {Part[]} parts
 * @param {Mesh} mesh
 */
function also(parts, mesh) {
  const told = parts
    .slice(0, NAMED)
    .map(({ took, part, kind, axes, own }, i) => [
      i ? "; " : "also ",
      own ? kind : [kind, " over ", over(axes, null, mesh)],
      ` ${share(part)}, ${took}`,
    ]);
  const left = parts.slice(NAMED);
  const more = left.reduce((sum, { part }) => sum + part, 0);
  return [told, left.length ? `; and ${left.length} more, ${share(more)} together` : null];
}
