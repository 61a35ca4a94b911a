// The predicted bubble against the number of microbatches, a line for each schedule, which leads to its name.

import { s } from "../shared/dom.js";
import { rounded } from "../shared/format.js";

/** @import { Choices, Setting } from "./choices.js" */

const [WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LABELS, LEAD] = [280, 172, 30, 24, 20, 98, 20]; // px
const LINE = 12; // px between two labels

/** @typedef {[microbatches: number, bubble: number]} Point */
/** @typedef {{ name: string, dash: string, on: boolean, points: Point[] }} ChartCurve */

const DASHES = ["1 2", "4 2", "7 2 1 2", "2 2 6 2", "8 3", "3 1", "1 1", "10 2 2 2 2 2"];
const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.25];

/**
 * @param {Choices} choices
 * @param {Setting} choice
 */
export function chart(choices, choice) {
  const { now } = choices;
  const ms = choices.values.microbatches;
  const curves = choices.values.schedule
    .map((name, i) => ({
      name,
      dash: DASHES[i % DASHES.length],
      on: name === choice.schedule,
      points: choices.curve(name, choice),
    }))
    .filter(({ points }) => points.length);
  const right = WIDTH - LABELS;
  const height = Math.max(HEIGHT, TOP + BOTTOM + LINE * curves.length); // room for all names
  const bottom = height - BOTTOM;
  const [low, high] = [Math.log2(ms[0]), Math.log2(ms[ms.length - 1])];
  const x = (/** @type {number} */ m) =>
    LEFT + (high > low ? ((right - LEFT) * (Math.log2(m) - low)) / (high - low) : (right - LEFT) / 2);
  const most = Math.max(0.02, now.bubble, ...curves.flatMap(({ points }) => points.map(([, bubble]) => bubble)));
  const step = STEPS.find((each) => most / each <= 4) ?? 0.25;
  const end = step * Math.ceil(most / step - 1e-9);
  const y = (/** @type {number} */ bubble) => bottom - ((bottom - TOP) * bubble) / end;
  const marks = Array.from({ length: Math.round(end / step) + 1 }, (_, i) => i * step);
  const path = (/** @type {Point[]} */ points) =>
    points.map(([m, bubble], i) => `${i ? "L" : "M"}${x(m).toFixed(1)} ${y(bubble).toFixed(1)}`).join("");
  const chosen = /** @type {{ bubble: number }} */ (choices.row(choice)).bubble;
  return s(
    "svg",
    { width: WIDTH, height, role: "img", "aria-label": told(curves) },
    s("text", { x: 0, y: 10, class: "jsm-mark" }, "predicted bubble against microbatches"),
    marks.map((share, i) => [
      s("line", {
        x1: LEFT,
        x2: right,
        y1: Math.round(y(share)) + 0.5,
        y2: Math.round(y(share)) + 0.5,
        class: "jsm-hair",
      }),
      s(
        "text",
        { x: LEFT - 5, y: y(share) + 3.5, "text-anchor": "end", class: "jsm-mark" },
        label(share, i === marks.length - 1),
      ),
    ]),
    ms.map((m) => s("text", { x: x(m), y: height - 6, "text-anchor": "middle", class: "jsm-mark" }, m)),
    labelled(curves, y, bottom).map(({ names, points, dash, on, at }) => {
      const [m, bubble] = points[points.length - 1];
      const [from, to] = [at, at + LINE * (names.length - 1)];
      const bracket = to > from ? `M${right + LEAD} ${from}V${to}` : "";
      return s(
        "g",
        { class: on ? "jsm-pp-one jsm-pp-chosen" : "jsm-pp-one" },
        s("path", { d: path(points), class: "jsm-pp-near" }),
        s("path", { d: path(points), class: "jsm-pp-curve", "stroke-dasharray": on ? null : dash }),
        s("path", { d: `M${x(m)} ${y(bubble)}L${right + LEAD} ${(from + to) / 2}${bracket}`, class: "jsm-pp-lead" }),
        names.map((name, i) =>
          s(
            "text",
            {
              x: right + LEAD + 4,
              y: at + LINE * i + 3.5,
              class: name === choice.schedule ? "jsm-mark jsm-ink jsm-pp-bold" : "jsm-mark",
            },
            name,
          ),
        ),
      );
    }),
    now.stages === choice.stages && inside(now.microbatches, ms)
      ? s("circle", { cx: x(now.microbatches), cy: y(now.bubble), r: 3.5, class: "jsm-pp-point" })
      : null,
    s("circle", { cx: x(choice.microbatches), cy: y(chosen), r: 4, class: "jsm-pp-hollow" }),
  );
}

/**
 * @param {number} m
 * @param {number[]} ms
 */
const inside = (m, ms) => m >= ms[0] && m <= ms[ms.length - 1];

/**
 * @param {number} share
 * @param {boolean} last
 */
const label = (share, last) => `${rounded(100 * share, 0)}${last ? "%" : ""}`;

/**
 * The curves with the names of all that are the same, from top to bottom, and where the first name stands: at the end
 * of its line, farther on where others stand there.
 *
 * @param {ChartCurve[]} curves
 * @param {(bubble: number) => number} y
 * @param {number} bottom
 */
function labelled(curves, y, bottom) {
  /** @type {Map<string, { names: string[], points: Point[], dash: string, on: boolean }>} */
  const same = new Map();
  for (const { name, dash, on, points } of curves) {
    const key = points.map(([m, bubble]) => `${m} ${bubble.toFixed(4)}`).join();
    const found = same.get(key) ?? { names: [], points, dash, on: false };
    same.set(key, { ...found, names: [...found.names, name], on: found.on || on });
  }
  const ends = [...same.values()]
    .map((each) => ({ ...each, end: y(each.points[each.points.length - 1][1]), at: 0 }))
    .sort((a, b) => a.end - b.end);
  const high = (/** @type {{ names: string[] }} */ { names }) => LINE * names.length;
  let free = 0;
  for (const each of ends) {
    each.at = Math.max(free, each.end - (high(each) - LINE) / 2);
    free = each.at + high(each);
  }
  let floor = bottom + LINE;
  for (const each of ends.toReversed()) {
    each.at = Math.min(each.at, floor - high(each));
    floor = each.at;
  }
  return ends;
}

/** @param {ChartCurve[]} curves */
const told = (curves) =>
  `Predicted bubble against microbatches: ${curves
    .map(
      ({ name, points }) => `${name} ${points.map(([m, bubble]) => `${rounded(100 * bubble, 1)}% at ${m}`).join(", ")}`,
    )
    .join("; ")}`;
