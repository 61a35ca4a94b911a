// What is told of an action, a bubble or what is held, beside the pointer or the keyboard's place.

import { h, replace } from "../shared/dom.js";
import { bytes } from "../shared/format.js";
import { KINDS } from "./events.js";
import { NAMES, number, time } from "./say.js";

/** @import { Events, Place } from "./events.js" */
/** @import { LanesData } from "./lanes.js" */

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Lane } from "./events.js" */
/** @typedef {(string | string[])[]} Line texts, every other one quiet; a list of one at the front stands out */

const SEEN = 0.002; // of the time on show: a shorter wait is not told

/** @param {string | string[]} text */
const quiet = (text) => h("span", { class: "jsm-quiet" }, text);

/**
 * An action in lines: `{head, lines}`, each line a list of texts, every other one quiet.
 *
 * @param {Events} events
 * @param {LanesData} data
 * @param {Place} place
 */
export function told(events, data, { rank, event }) {
  const own = events.lanes[rank];
  const { unit, source } = data;
  /** @type {Line[]} */
  const lines = [];
  for (let part = own.first[event]; part < own.first[event + 1]; part += 1) {
    const letter = KINDS[own.kind[part]];
    const [stage, mb] = [own.stage[part], own.mb[part]];
    lines.push([[`${stage}${letter}${mb}`], ` ${NAMES[letter]}, microbatch ${mb}, stage ${stage}`]);
  }
  const took = own.end[event] - own.start[event];
  if (data.lines) return toldLine(data, data.lines, own, event, took);
  const ideal = events.hasIdeal ? ["; ideal ", time(own.idealEnd[event] - own.idealStart[event], unit)] : [];
  lines.push([`${source} `, time(took, unit), " from ", time(own.start[event], unit), ...ideal]);
  const waited = own.start[event] - (event ? own.end[event - 1] : 0);
  const need = events.needs(rank, event);
  if (waited > SEEN * events.end && need) {
    lines.push(["idle ", time(waited, unit), " before, waiting for ", events.text(need.rank, need.event)]);
  }
  return lines;
}

/**
 * A piece of a recorded step: its line, what is done, and for how long.
 *
 * @param {LanesData} data
 * @param {Sent.LinesInTime["lines"]} lines
 * @param {Lane} lane
 * @param {number} event
 * @param {number} took
 * @returns {Line[]}
 */
function toldLine({ unit, source }, lines, { first, kind, mb, start }, event, took) {
  const [name, text] = lines[mb[first[event]]];
  const did = NAMES[KINDS[kind[first[event]]]];
  const lasts = [`${source} `, time(took, unit), " from ", time(start[event], unit)];
  return [[[name], ` ${did}`], ...(text ? [["", text]] : []), lasts];
}

/**
 * The time in which `rank` is idle around `at`.
 *
 * @param {Events} events
 * @param {LanesData} data
 * @param {number} rank
 * @param {number} at
 */
export function toldIdle(events, data, rank, at) {
  const { start, end, count } = events.lanes[rank];
  const next = events.upTo(rank, at);
  const from = next ? end[next - 1] : 0;
  const to = next < count ? start[next] : data.end;
  const lines = [[`${data.lines ? "idle" : "bubble"} `, time(to - from, data.unit), " from ", time(from, data.unit)]];
  const need = next < count ? events.needs(rank, next) : null;
  if (need) lines.push(["waiting for ", events.text(need.rank, need.event), ", then ", events.text(rank, next)]);
  return lines;
}

/**
 * What `rank` holds at a time, with its bytes where they are known.
 *
 * @param {Events} events
 * @param {LanesData} data
 * @param {number} rank
 * @param {number} at
 */
export function toldHeld(events, { ranks, unit }, rank, at) {
  let held = 0;
  for (const [from, count] of events.held(rank)) {
    if (from > at) break;
    held = count;
  }
  const { name, peak, size } = ranks[rank];
  const of = size !== null && peak ? ` (${bytes((size * held) / peak)})` : "";
  return [[`${name} holds `, `${number(held)}${of}`, " of its microbatches' activations at ", time(at, unit)]];
}

/**
 * Lines as one sentence for those who hear them.
 *
 * @param {Line[]} lines
 */
export const spoken = (lines) => lines.map((line) => line.flat().join("")).join("; ");

export class Tip {
  constructor() {
    this.element = h("div", { class: "jsm-tip jsm-pp-tip", "aria-hidden": "true", hidden: true });
  }

  /**
   * Show `lines` beside (x, y) of the element that it lies in, above or below what stands there, `height` px high.
   *
   * @param {Line[]} lines
   * @param {number} x
   * @param {number} y
   * @param {number} height
   */
  show(lines, x, y, height) {
    const { element } = this;
    replace(element, lines.map(line));
    element.hidden = false;
    const around = /** @type {HTMLElement} */ (element.parentElement);
    const { offsetWidth: width, offsetHeight: tall } = element;
    const below = y + height + 6;
    element.style.left = `${Math.max(0, Math.min(x + 10, around.clientWidth - width))}px`;
    element.style.top = `${below + tall <= around.clientHeight ? below : Math.max(0, y - tall - 6)}px`;
  }

  hide() {
    this.element.hidden = true;
  }
}

/** @param {Line} texts */
function line(texts) {
  const [first] = texts;
  if (Array.isArray(first)) return h("div", {}, h("b", {}, first), texts.slice(1));
  return h(
    "div",
    {},
    texts.map((text, i) => (i % 2 ? text : quiet(text))),
  );
}
