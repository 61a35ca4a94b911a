// The predicted step as one bar: what a device computes, then each kind of collective over its axes.

import { h, replace, s } from "../shared/dom.js";
import { seconds, share } from "../shared/format.js";
import { SEAM, over, overText, pieces } from "../shared/kinds.js";

const BAR = 12; // px
const AWAY = 6; // px between a label and the next part
const LEAST = 0.01; // of the step: a smaller part is told in the communication view alone
const NAMED = 3; // parts told in words that have no label
const OWN = "what a device does itself: each product takes as long as its arithmetic or its memory, whichever is longer";

/** The bar of a payload's `time` with its labels; nothing for none. */
export function timeStrip(time, mesh) {
  if (!time) return null;
  const parts = time.parts.map(([kind, axes, spent]) => ({ kind, axes, spent, part: time.total ? spent / time.total : 0 }));
  const labels = parts.map((each) => label(each, mesh));
  const place = h("div", { class: "jsm-strip-labels" }, labels);
  const rest = h("p", { class: "jsm-small jsm-quiet", hidden: true });
  const element = h(
    "div",
    { class: "jsm-strip" },
    bar(parts, mesh, time.text),
    place,
    rest,
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

function bar([own, ...rest], mesh, text) {
  const told = [own, ...rest].map((each) => `${named(each, mesh)} ${share(each.part)}, ${seconds(each.spent)}`);
  const label = `Predicted step of ${text}: ${told.join("; ")}`;
  const from = 100 * own.part;
  const moved = s("svg", { x: `${from}%`, width: `${100 - from}%`, height: BAR }, within(rest));
  return s(
    "svg",
    { width: "100%", height: BAR, role: "img", "aria-label": label },
    s("title", {}, told.join("\n")),
    s("rect", { width: `${from}%`, height: BAR, fill: "var(--jsm-compute)" }),
    moved,
    from > 0 && s("rect", { x: `${from}%`, width: SEAM, height: BAR, fill: "var(--jsm-bg)" }),
  );
}

/** The collectives, as shares of all of them. */
function within(parts) {
  const all = parts.reduce((sum, { part }) => sum + part, 0) || 1;
  return pieces(parts.map(({ kind, axes, part }) => ({ kind, axes, size: (100 * part) / all })), BAR);
}

const named = ({ kind, axes }, mesh) => (kind === null ? "compute" : `${kind} over ${overText(axes, null, mesh)}`);

function label({ kind, axes, spent, part }, mesh) {
  const what = kind === null ? null : [over(axes, null, mesh), " "];
  return h(
    "div",
    { class: "jsm-strip-label", title: kind === null ? `compute: ${OWN}` : null },
    h("div", { class: "jsm-strip-kind" }, kind ?? "compute"),
    h("div", { class: "jsm-quiet" }, what, share(part), h("span", { class: "jsm-strip-time" }, ` ${seconds(spent)}`)),
  );
}

/** Put each label under its part, without its time where that is too wide; returns the parts that have no room. */
function fitted(parts, labels, width) {
  let at = 0;
  return parts.filter(({ part }, i) => {
    const node = labels[i];
    node.style.left = `${100 * at}%`;
    at += part;
    const room = part * width - (i < parts.length - 1 ? AWAY : 0);
    const fits = (timed) => {
      node.classList.toggle("jsm-untimed", !timed);
      return node.offsetWidth <= room;
    };
    node.hidden = false;
    node.hidden = !fits(true) && !fits(false);
    return node.hidden && part >= LEAST;
  });
}

/** `also all-to-all over data 0.6%, 278 us`: parts too small for a label. */
function also(parts, mesh) {
  const told = parts.slice(0, NAMED).map(({ spent, part, kind, axes }, i) => [
    i ? "; " : "also ",
    kind === null ? "compute" : [kind, " over ", over(axes, null, mesh)],
    ` ${share(part)}, ${seconds(spent)}`,
  ]);
  const left = parts.slice(NAMED);
  const more = left.reduce((sum, { part }) => sum + part, 0);
  return [told, left.length ? `; and ${left.length} more, ${share(more)} together` : null];
}
