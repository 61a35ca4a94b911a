// Peak memory against step time: a point for each trial, the Pareto front, the limit, and where the prediction was.

import { h, replace, s } from "../shared/dom.js";
import { OWN_KEYS } from "../shared/keyboard.js";
import { pick } from "./choice.js";
import { ABOVE_FIRST, AROUND, AT_END, placed } from "./labels.js";
import { byteScale, secondScale } from "./scale.js";
import { Tip } from "./tip.js";

/** @import { Box, Text } from "./labels.js" */
/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Choice } from "./choice.js" */

/** @typedef {Sent.Trial & { i: number, seconds: number, peak: number }} Point a trial of which both are known */
/** @typedef {Point & { x: number, y: number, r: number }} Drawn */

const [HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [236, 40, 12, 20, 34]; // px
const RADIUS = 4.5; // px of a point
const HIT = 20; // px of what answers the pointer
const SAME = 3; // px between points that one cannot tell apart
const LETTER = 6.7; // px of a letter of a name
const MARK = 5.6; // px of a letter of a caption
const LONGEST = 26; // letters of a name
const [TICK, GRID] = [64, 5]; // px between two ticks, and lines
const NEAR = 1.35; // times the fullest trial: a limit up to there is in the picture
const FRONT = "Pareto front: no other is both faster and smaller";
const HINT =
  "Peak memory against step time. Arrow keys move among the points, Enter chooses, Shift and Enter sets another" +
  " beside the chosen one.";

/** The picture in `scatter.element`: `draw()` makes it anew, as wide as it is, `mark()` follows the choice. */
export class Scatter {
  #data;
  #choice;
  #trials;
  /** @type {ReturnType<typeof plan>} */
  #plan;
  #tip;
  #picture = h("div");
  /** @type {Map<number | null, HTMLElement>} */
  #points;
  /** @type {number | null} */
  #active = null; // the trial that the Tab key reaches
  /** @type {number | null} */
  #focused = null; // the trial that the keyboard is on

  /**
   * @param {Sent.Comparison} data
   * @param {Choice} choice
   */
  constructor(data, choice) {
    this.#data = data;
    this.#choice = choice;
    this.#trials = /** @type {Point[]} */ (
      data.trials.map((trial, i) => ({ ...trial, i })).filter(({ point }) => point)
    );
    this.#tip = new Tip(data);
    this.#points = new Map(this.#trials.map((trial) => [trial.i, this.#option(trial)]));
    const list = h(
      "div",
      { ...OWN_KEYS, role: "listbox", "aria-label": HINT, "aria-multiselectable": "true" },
      this.#trials.toSorted(byTime).map(({ i }) => this.#points.get(i)),
    );
    list.addEventListener("keydown", (event) => this.#press(event));
    const size = { class: "jsm-cmp-scatter", style: { height: `${HEIGHT}px` } };
    this.element = h("div", size, this.#picture, list, this.#tip.element);
  }

  /** @param {Point} trial */
  #option(trial) {
    const { i } = trial;
    return h("div", {
      class: "jsm-cmp-point",
      role: "option",
      "aria-label": spoken(trial),
      onclick: (event) => this.#pick(this.#meant(i, event), event),
      onpointerenter: () => this.#point(i),
      onpointerleave: () => this.#leave(),
      onfocus: () => this.#focus(i),
      onblur: () => this.#blur(),
    });
  }

  /**
   * @param {number} i
   * @param {MouseEvent | KeyboardEvent} event
   */
  #pick(i, event) {
    this.#active = i;
    pick(this.#choice, i, event);
  }

  /**
   * Of trials at the same place each further click means the next one.
   *
   * @param {number} i
   * @param {MouseEvent} event
   */
  #meant(i, { shiftKey }) {
    const { chosen, other } = this.#choice;
    const here = this.#here(i).filter((each) => !shiftKey || each !== chosen || each === i);
    return here[(here.indexOf((shiftKey ? other : chosen) ?? -1) + 1) % here.length];
  }

  /** @param {number} i */
  #here(i) {
    const { x, y } = this.#at(i);
    const near = (/** @type {number} */ each) =>
      Math.abs(this.#at(each).x - x) < SAME && Math.abs(this.#at(each).y - y) < SAME;
    return this.#trials.map((trial) => trial.i).filter(near);
  }

  /** @param {KeyboardEvent} event */
  #press(event) {
    const i = this.#trials.find((trial) => this.#points.get(trial.i) === event.target)?.i;
    if (i === undefined) return;
    const to = this.#next(i, event.key);
    if (to !== undefined) this.#points.get(to)?.focus();
    else if (event.key === "Enter" || event.key === " ") this.#pick(i, event);
    else if (event.key === "Escape") this.#escape();
    else return;
    event.preventDefault();
  }

  #escape() {
    if (this.#tip.element.hidden) this.#choice.back();
    else this.#tip.hide();
  }

  /**
   * The trial that a key leads to: left and right by step time, up and down by memory.
   *
   * @param {number} i
   * @param {string} key
   */
  #next(i, key) {
    const across = ["ArrowLeft", "ArrowRight", "Home", "End"].includes(key);
    if (!across && key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    const order = this.#trials.toSorted(across ? byTime : byPeak).map((trial) => trial.i);
    const ends = { Home: -order.length, End: order.length };
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, ...ends }[key] ?? 0;
    return order[Math.max(0, Math.min(order.length - 1, order.indexOf(i) + step))];
  }

  /** @param {number} i */
  #point(i) {
    this.#choice.point(i);
    const { x, y } = this.#at(i);
    const others = this.#here(i).filter((each) => each !== i);
    this.#tip.show(
      this.#data.trials[i],
      x,
      y,
      others.map((each) => this.#data.trials[each].label),
    );
  }

  #leave() {
    this.#tip.hide();
    this.#choice.point(null);
  }

  /**
   * Whoever comes by keyboard sees what the pointer would show.
   *
   * @param {number} i
   */
  #focus(i) {
    this.#active = i;
    this.#reach();
    if (!this.#points.get(i)?.matches(":focus-visible")) return;
    this.#focused = i;
    this.#point(i);
  }

  #blur() {
    if (this.#focused !== null) this.#leave();
    this.#focused = null;
  }

  #reach() {
    const { chosen } = this.#choice;
    const active = this.#active ?? (this.#points.has(chosen) ? chosen : this.#trials[0].i);
    for (const [i, node] of this.#points) node.tabIndex = i === active ? 0 : -1;
  }

  /** @param {number} i */
  #at(i) {
    const { x, y } = this.#plan;
    const { seconds, peak } = this.#data.trials[i];
    return { x: x(/** @type {number} */ (seconds)), y: y(/** @type {number} */ (peak)) };
  }

  draw() {
    this.#plan = plan(this.#trials, this.#data.limit, Math.floor(this.element.clientWidth));
    for (const { i } of this.#trials) {
      const { x, y } = this.#at(i);
      Object.assign(/** @type {HTMLElement} */ (this.#points.get(i)).style, {
        left: `${x - HIT / 2}px`,
        top: `${y - HIT / 2}px`,
      });
    }
    this.#tip.hide();
    this.mark();
  }

  mark() {
    const { chosen, other } = this.#choice;
    for (const [i, node] of this.#points) node.setAttribute("aria-selected", String(i === chosen || i === other));
    this.#reach();
    if (this.#plan) replace(this.#picture, this.#drawn());
  }

  #drawn() {
    const { width, right, bottom } = this.#plan;
    const points = this.#trials.map((trial) => ({ ...trial, ...this.#at(trial.i), r: this.#radius(trial.i) }));
    const tails = points.flatMap(({ x, y, tail }) => (tail === null ? [] : [[this.#plan.x(tail), x, y]]));
    const front = points.filter((point) => point.front).sort(byTime);
    return s(
      "svg",
      { width, height: HEIGHT, "aria-hidden": "true" },
      this.#axes(),
      this.#limit(),
      front.length ? area(front, right) : null,
      tails.map(([from, to, y]) => s("line", { x1: from, x2: to, y1: y, y2: y, class: "jsm-cmp-tail" })),
      points.toSorted((a, b) => a.r - b.r).map((point) => this.#circle(point)),
      this.#names(points, tails, front, [LEFT + 2, TOP - 6, right + RIGHT, bottom - 1]),
    );
  }

  #axes() {
    const { x, y, right, bottom, across, up } = this.#plan;
    const { source } = this.#data;
    const how = this.#trials.some(({ tail }) => tail !== null)
      ? `${source}; the tail starts at the prediction`
      : source;
    const line = (/** @type {number} */ y1) => s("line", { x1: LEFT, x2: right, y1, y2: y1, class: "jsm-hair" });
    const named = { x: right, y: HEIGHT - 5, "text-anchor": "end", class: "jsm-mark jsm-ink" };
    return [
      up.ticks.map(([size, label]) => [
        line(Math.round(y(size)) + 0.5),
        s("text", { x: LEFT - 6, y: y(size) + 3.5, "text-anchor": "end", class: "jsm-mark" }, label),
      ]),
      across.ticks.map(([seconds, label]) => [
        s("line", { ...upright(x(seconds)), y1: bottom, y2: bottom + 4, class: "jsm-hair" }),
        s("text", { x: x(seconds), y: bottom + 15, "text-anchor": "middle", class: "jsm-mark" }, label),
      ]),
      s("text", { x: 0, y: 9, class: "jsm-mark jsm-ink" }, `peak memory, ${up.unit}`),
      s("text", named, `step time, ${across.unit} (${how})`),
    ];
  }

  #limit() {
    const { limit, limit_text: text } = this.#data;
    const { y, right, up } = this.#plan;
    if (limit === null) return null;
    const inside = limit <= up.to;
    const at = Math.round(y(limit)) + 0.5;
    return [
      inside && s("line", { x1: LEFT, x2: right, y1: at, y2: at, class: "jsm-cmp-limit" }),
      s(
        "text",
        { x: right, y: inside ? at - 4 : 9, "text-anchor": "end", class: "jsm-mark jsm-cmp-limit-text jsm-halo" },
        inside ? `limit ${text}` : `limit ${text} is above the plot \u2191`,
      ),
    ];
  }

  /** @param {Drawn} point */
  #circle({ i, x, y, r, front, over }) {
    const { chosen, pair } = this.#choice;
    const which = pair === null ? null : (["A", "B"][pair.indexOf(i)] ?? null);
    const look = classes(
      "jsm-cmp-dot",
      front && "jsm-cmp-front",
      over && "jsm-cmp-over",
      i === chosen && "jsm-cmp-chosen",
    );
    const letter = {
      x,
      y: y + 3.5,
      "text-anchor": "middle",
      class: classes("jsm-mark jsm-cmp-ab", front && "jsm-cmp-on"),
    };
    return [s("circle", { cx: x, cy: y, r, class: look }), which && s("text", letter, which)];
  }

  /** @param {number} i */
  #radius(i) {
    const { chosen, pair, pointed } = this.#choice;
    return pair?.includes(i) ? 7.5 : i === chosen ? 6 : i === pointed ? 5.5 : RADIUS;
  }

  /**
   * Names beside their points as far as there is room, and what the front is under its end.
   *
   * @param {Drawn[]} points
   * @param {number[][]} tails
   * @param {Drawn[]} front
   * @param {Box} bounds
   */
  #names(points, tails, front, bounds) {
    const { chosen, other, pointed } = this.#choice;
    const rank = (/** @type {Drawn} */ { i, front }) => (i === chosen ? 0 : i === other ? 1 : front ? 2 : 4);
    /** @type {(Omit<Drawn, "more"> & Text & { rank: number, text: string, look: string })[]} */
    const names = points.map((point) => ({
      ...point,
      rank: rank(point),
      text: short(point.label),
      width: LETTER * short(point.label).length,
      places: point.front ? ABOVE_FIRST : AROUND,
      must: rank(point) < 2,
      more: point.i === pointed ? 0 : point.r - RADIUS,
      look: classes(
        "jsm-mono jsm-halo jsm-cmp-label",
        rank(point) < 2 && "jsm-cmp-chosen",
        (point.i === pointed || point.front) && "jsm-ink",
      ),
    }));
    const last = front.at(-1);
    if (last) {
      const at = { ...last, x: bounds[2] - RIGHT, rank: 3, i: -1, must: false, more: 0 };
      names.push({ ...at, text: FRONT, width: MARK * FRONT.length, places: AT_END, look: "jsm-mark jsm-halo" });
    }
    names.sort((a, b) => a.rank - b.rank || byTime(a, b));
    /** @type {Box[]} */
    const taken = [
      ...points.map(({ x, y, i, r }) => boxAround(x, y, i === pointed ? RADIUS : r)),
      ...tails.map(([from, to, y]) => /** @type {Box} */ ([Math.min(from, to), y - 2, Math.max(from, to), y + 2])),
      ...front.map(({ x, y }, i) => /** @type {Box} */ ([x, y - 1, front[i + 1]?.x ?? bounds[2], y + 1])),
    ];
    const places = placed(names, taken, bounds);
    const under = pointed === null ? -1 : names.findIndex(({ i }) => i === pointed);
    if (under >= 0 && !places[under]) {
      const there = places.flatMap((place) => (place ? [place.box] : []));
      [places[under]] = placed([{ ...names[under], must: true }], [...taken, ...there], bounds);
    }
    return places.map((place, k) => {
      const { text, look } = names[k];
      return place && s("text", { x: place.x, y: place.y, "text-anchor": place.end, class: look }, text);
    });
  }
}

/** @param {...(string | false | null)} names */
const classes = (...names) => names.filter(Boolean).join(" ");

/** @param {number} x */
const upright = (x) => ({ x1: Math.round(x) + 0.5, x2: Math.round(x) + 0.5 });

/**
 * @param {number} x
 * @param {number} y
 * @param {number} r
 * @returns {Box}
 */
const boxAround = (x, y, r) => [x - r - 1.5, y - r - 1.5, x + r + 1.5, y + r + 1.5];

/**
 * @param {Pick<Point, "seconds" | "peak" | "i">} a
 * @param {Pick<Point, "seconds" | "peak" | "i">} b
 */
const byTime = (a, b) => a.seconds - b.seconds || a.peak - b.peak || a.i - b.i;

/**
 * @param {Point} a
 * @param {Point} b
 */
const byPeak = (a, b) => a.peak - b.peak || a.seconds - b.seconds || a.i - b.i;

/** @param {string} name */
const short = (name) => (name.length > LONGEST ? `${name.slice(0, LONGEST - 1)}\u2026` : name);

/** @param {Sent.Trial} trial */
function spoken({ label, seconds_text: time, peak_text: peak, front, over }) {
  const where = front ? ", on the Pareto front" : over ? ", does not fit" : "";
  return `${label}: ${time}, ${peak}${where}`;
}

/**
 * Where times and bytes lie in a picture that is `width` px wide.
 *
 * @param {Point[]} trials
 * @param {number | null} limit
 * @param {number} width
 */
function plan(trials, limit, width) {
  const [right, bottom] = [width - RIGHT, HEIGHT - BOTTOM];
  const peaks = trials.map(({ peak }) => peak);
  const near = limit !== null && limit <= NEAR * Math.max(...peaks);
  const times = trials.flatMap(({ seconds, tail }) => (tail === null ? [seconds] : [seconds, tail]));
  const across = secondScale(times, Math.max(2, Math.floor((right - LEFT) / TICK)));
  const up = byteScale(near ? [...peaks, limit] : peaks, GRID);
  const x = (/** @type {number} */ seconds) =>
    LEFT + ((right - LEFT) * (seconds - across.from)) / (across.to - across.from);
  const y = (/** @type {number} */ size) => bottom - ((bottom - TOP) * (size - up.from)) / (up.to - up.from);
  return { width, right, bottom, across, up, x, y };
}

/**
 * All that some point of the front is both faster and smaller than, and its edge.
 *
 * @param {Drawn[]} front
 * @param {number} right
 */
function area(front, right) {
  const [first, ...rest] = front.map(({ x, y }) => [x.toFixed(1), y.toFixed(1)]);
  const edge = `M${first[0]} ${TOP}V${first[1]}${rest.map(([x, y]) => `H${x}V${y}`).join("")}H${right}`;
  return [s("path", { d: `${edge}V${TOP}Z`, class: "jsm-cmp-beaten" }), s("path", { d: edge, class: "jsm-cmp-edge" })];
}
