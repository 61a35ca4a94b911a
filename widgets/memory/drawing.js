// The shapes that bars are made of.

import { s, uniqueId } from "../shared/dom.js";
import { bytes, count } from "../shared/format.js";
import { endOf, excessOf, isMeasured, measuredOf, reachOf, rolesOf } from "./devices.js";
import { ticks } from "./scale.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Bar } from "./devices.js" */
/** @import { Scale } from "./scale.js" */

/** @typedef {ReturnType<typeof hatches>} Hatch */
/** @typedef {NonNullable<ReturnType<typeof roomOf>>} Room where the headroom is told */

export const [ROW, TOP] = [19, 18]; // px of a row, and above the first
const [BAR, Y, BASE, BOTTOM] = [13, 3, 13, 22]; // a bar's height and place in its row, its text's baseline; below
const SEEN = 0.3; // px from which a role is drawn, and how wide at least
const LEAST = 0.75;
const GAP = 0.75; // between two roles
const OVER = 2.5; // px that a measured peak's tick is longer than the bar at either end
const OPEN = 26; // px that a bar is open at its end where more is held than is known
const NARROW = 5.6; // px of a letter of the marks' size
const SEAM = 9; // px between two columns of figures
const ARROW = 8; // px of arrow at least on either side of the headroom

/** The patterns, one set for all bars of a view: `url` of each by its name, `fill` with an edge too, their `defs`. */
export function hatches() {
  const made = { other: uniqueId("other"), batch: uniqueId("batch"), error: uniqueId("error") };
  const url = (/** @type {keyof typeof made} */ name) => `url(#${made[name]})`;
  const pattern = (
    /** @type {string} */ id,
    /** @type {number} */ size,
    /** @type {number} */ turn,
    /** @type {string} */ ground,
    /** @type {string} */ ink,
    /** @type {number} */ width,
  ) =>
    s(
      "pattern",
      { id, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${turn})` },
      s("rect", { width: size, height: size, fill: ground }),
      s("rect", { width, height: size, fill: ink }),
    );
  return {
    url,
    fill: (/** @type {keyof typeof made} */ name) => ({ fill: url(name), stroke: `var(--jsm-${name})` }),
    defs: s(
      "defs",
      {},
      pattern(made.other, 4, 45, "var(--jsm-bg)", "var(--jsm-other)", 1.6),
      pattern(made.batch, 4, 0, "var(--jsm-batch)", "var(--jsm-bg)", 0.8),
      pattern(made.error, 4, 45, "var(--jsm-bg)", "var(--jsm-error)", 2),
    ),
  };
}

/**
 * What stands behind the rows: ticks, the limit, the heads of the columns. `room` is the headroom's label.
 *
 * @param {Sent.Memory} memory
 * @param {Bar[]} bars
 * @param {Scale} plan
 * @param {ReturnType<typeof roomOf>} room
 * @param {Hatch} hatch
 */
export function frame(memory, bars, plan, room, hatch) {
  const bottom = TOP + bars.length * ROW;
  const { width, x, end, ends } = plan;
  const most = onScale(memory, plan);
  return s(
    "svg",
    { class: "jsm-bars-frame", width, height: bottom + BOTTOM, "aria-hidden": "true" },
    hatch.defs,
    ticks(end).map(([at, label]) => tick(Math.round(x(at)) + 0.5, at, label, bottom, room)),
    s("text", { x: 0, y: 8, class: "jsm-mark" }, "device"),
    s("text", { x: ends[0], y: 8, class: "jsm-mark", "text-anchor": "end" }, memory.source),
    isMeasured(memory) ? measuredHead(ends) : null,
    most === null ? null : limit(memory, most, bars, plan, bottom),
  );
}

/**
 * The limit where it lies on the scale of the bars, else null.
 *
 * @param {Sent.Memory} memory
 * @param {Scale} plan
 */
const onScale = ({ limit: most }, { end }) => (most !== null && most <= end ? most : null);

/**
 * The head of the column of measured peaks, with their tick, between where that column and the one before end.
 *
 * @param {number[]} ends
 */
const measuredHead = ([before, end]) => [
  s("path", { d: `M${before + SEAM} 0V10`, class: "jsm-bar-measured" }),
  s("text", { x: end, y: 8, class: "jsm-mark", "text-anchor": "end" }, "measured"),
];

/**
 * A tick leaves out the row of the headroom's label where that stands on it.
 *
 * @param {number} x
 * @param {number} at
 * @param {string} label
 * @param {number} bottom
 * @param {Room | null} room
 */
function tick(x, at, label, bottom, room) {
  const across = room && room.from < x && x < room.to;
  const line = across
    ? `M${x} ${TOP - 3}V${TOP + room.row * ROW}M${x} ${TOP + (room.row + 1) * ROW}V${bottom}`
    : `M${x} ${TOP - 3}V${bottom}`;
  return [
    s("path", { d: line, class: "jsm-hair" }),
    s("text", { x, y: bottom + 14, class: "jsm-mark", "text-anchor": at === 0 ? "start" : "middle" }, label),
  ];
}

/**
 * @param {Sent.Memory} memory
 * @param {number} most
 * @param {Bar[]} bars
 * @param {Scale} plan
 * @param {number} bottom
 */
function limit(memory, most, bars, { x, x0, x1 }, bottom) {
  const at = Math.round(x(most)) + 0.5;
  const over = Math.max(...bars.map(({ top }) => excessOf(memory, top) ?? 0));
  const text = `${over > 0 ? `${bytes(over)} too much, ` : ""}limit ${memory.limit_text}`;
  const long = NARROW * text.length;
  const place =
    at - long > x0 + 16 // clear of the head of the labels
      ? { x: at, "text-anchor": "end" }
      : { x: Math.min(at, x1 - long), "text-anchor": "start" };
  return [
    s("path", { d: `M${at} ${TOP - 6}V${bottom}`, class: "jsm-limit-line" }),
    s("text", { ...place, y: 8, class: "jsm-mark jsm-limit" }, text),
  ];
}

/**
 * One row: label, bar, what is too much or left, the peak. `room` is where the headroom is told, null elsewhere;
 * `strong` is whether the peak stands out.
 *
 * @param {Sent.Memory} memory
 * @param {Bar} bar
 * @param {Scale} plan
 * @param {{ room: ReturnType<typeof roomOf>, strong: boolean }} told
 * @param {Hatch} hatch
 */
export function row(memory, bar, { width, x0, x, ends }, { room, strong }, hatch) {
  const { label, stage, top } = bar;
  const [peak, excess] = [memory.devices.peak[top], excessOf(memory, top) ?? 0];
  const end = x(reachOf(memory, top));
  const after = x(endOf(memory, bar));
  const measured = measuredOf(memory, bar);
  const times = timesText(bar);
  const held = `jsm-mark jsm-bar-held${strong ? " jsm-strong" : ""}`;
  return s(
    "svg",
    { width, height: ROW, "aria-hidden": "true" },
    s(
      "text",
      { x: x0 - 8, y: BASE, "text-anchor": "end", class: "jsm-mark jsm-bar-name" },
      label,
      stage ? stageText(stage) : null,
    ),
    segments(memory, top, x, hatch),
    excess > 0 && peak !== null ? tooMuch(x(peak - excess), x(peak), hatch) : null,
    peak === null ? openEnd(end) : null,
    times
      ? s("text", { x: (peak === null ? Math.max(after, end + OPEN) : after) + 8, y: BASE, class: "jsm-mark" }, times)
      : null,
    room ? headroom(room) : null,
    measured ? measuredTick(x(measured.size)) : null,
    s("text", { x: ends[0], y: BASE, "text-anchor": "end", class: held }, bytes(peak)),
    ends.length > 1
      ? s("text", { x: ends[1], y: BASE, "text-anchor": "end", class: "jsm-mark" }, bytes(measured?.size))
      : null,
  );
}

/** @param {string} stage */
const stageText = (stage) => s("tspan", { class: "jsm-bar-stage" }, ` ${stage}`);

/**
 * A tick over all of the row, with a seam of the ground beside it: it may stand on the bar.
 *
 * @param {number} x
 */
function measuredTick(x) {
  const d = `M${x} ${Y - OVER}V${Y + BAR + OVER}`;
  return [s("path", { d, class: "jsm-bar-seam" }), s("path", { d, class: "jsm-bar-measured" })];
}

/**
 * `× 63`, empty where the label says so already.
 *
 * @param {Bar} bar
 */
const timesText = ({ label, members }) =>
  members.length > 1 && !label.endsWith(" devices") ? `\u00d7 ${count(members.length)}` : "";

/**
 * @param {Sent.Memory} memory
 * @param {Sent.Position} position
 * @param {Scale["x"]} x
 * @param {Hatch} hatch
 */
function segments(memory, position, x, hatch) {
  let at = 0;
  return rolesOf(memory).map((role) => {
    const from = x(at);
    at += memory.devices[role][position] ?? 0;
    const to = x(at);
    return to - from > SEEN ? segment(role, from, to, hatch) : null;
  });
}

/**
 * Batch is striped: in grey it is as dark as the optimizer and the temporaries, between which it stands.
 *
 * @param {Sent.MemoryRole} role
 * @param {number} from
 * @param {number} to
 * @param {Hatch} hatch
 */
function segment(role, from, to, hatch) {
  const width = Math.max(LEAST, to - from - (to - from > 4 * GAP ? GAP : 0));
  const box = { x: from, y: Y, width, height: BAR };
  if (role === "other") return s("rect", { ...box, ...hatch.fill("other"), "stroke-width": GAP });
  return s("rect", { ...box, fill: role === "batch" ? hatch.url("batch") : `var(--jsm-${role})` });
}

/**
 * @param {number} from
 * @param {number} to
 * @param {Hatch} hatch
 */
const tooMuch = (from, to, hatch) =>
  s("rect", { x: from, y: Y, width: Math.max(LEAST, to - from), height: BAR, ...hatch.fill("error") });

/** @param {number} x */
const openEnd = (x) =>
  s("path", { d: `M${x + OPEN} ${Y + 0.5}H${x + 1.5}V${Y + BAR - 0.5}H${x + OPEN}`, class: "jsm-bar-open" });

/**
 * Where the headroom of the bar at `at` is told, null where it is not known or has no room.
 *
 * @param {Sent.Memory} memory
 * @param {Bar[]} bars
 * @param {number} at
 * @param {Scale} plan
 */
export function roomOf(memory, bars, at, plan) {
  const most = onScale(memory, plan);
  if (most === null) return null;
  const { x } = plan;
  const excess = excessOf(memory, bars[at].top);
  if (excess === null || excess >= 0) return null;
  const text = `${bytes(-excess)} headroom`;
  const times = timesText(bars[at]);
  const start = x(endOf(memory, bars[at])) + 8 + (times ? NARROW * times.length + 6 : 0);
  const stop = x(most) - 3;
  const [middle, half] = [(start + stop) / 2, (NARROW * text.length) / 2 + 4];
  if (stop - start < 2 * (half + ARROW)) return null;
  return { row: at, start, stop, from: middle - half, to: middle + half, middle, text };
}

/** @param {Room} room */
function headroom({ start, stop, from, to, middle, text }) {
  const y = Y + BAR / 2;
  const heads = `M${start + 5} ${y - 3}l-5 3l5 3M${stop - 5} ${y - 3}l5 3l-5 3`;
  return [
    s("path", { d: `M${start} ${y}H${from}M${to} ${y}H${stop}${heads}`, class: "jsm-bar-room" }),
    s("text", { x: middle, y: BASE, "text-anchor": "middle", class: "jsm-mark jsm-ink" }, text),
  ];
}

/**
 * What a frame of so many bars takes.
 *
 * @param {Bar[]} bars
 */
export const heightOf = (bars) => TOP + bars.length * ROW + BOTTOM;
