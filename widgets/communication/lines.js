// The collectives by the line of code that causes them, as plain data.

import { bytes, count, rounded, seconds } from "../shared/format.js";

const WHOLE = 60; // lines of a source that are shown all
const AROUND = 3; // lines on either side of one that moves something, of a longer source
const LEAST = 4; // lines that are worth folding

/** @import * as Sent from "../shared/payload_types.js" */
/** @typedef {ReturnType<typeof linesOf>[number]} CodeLine of a source; its text or its part may be null */
/** @typedef {{ gap: number, lines: CodeLine[] }} Gap so many lines that are left out, and those that have a text */
/** @typedef {{ timed: boolean, weight: (part: Pick<Part, "seconds" | "sent">) => number }} Weigher */

/**
 * Collectives that are told as one: `sent` bytes and `seconds` that the device waits are of all `rows`, as `count` is,
 * and `links`, the seconds that they take there, of those whose overlap is known; `leaving` are the bytes that one host
 * or slice sends to others. Null is what is not known or, of `kind`, `axes` and `size`, what is not the same.
 *
 * @typedef {object} Part
 * @property {Sent.Collective[]} rows
 * @property {string | null} kind
 * @property {number[] | null} axes
 * @property {number | null} size
 * @property {number} count
 * @property {number} sent
 * @property {number | null} leaving
 * @property {number | null} seconds
 * @property {number | null} links
 * @property {boolean} exact
 */

/**
 * The parts that `rows` make by `key(row)`, in order of their first.
 *
 * @param {Sent.Collective[]} rows
 * @param {(row: Sent.Collective) => unknown} key
 */
export function merged(rows, key) {
  /** @type {Map<unknown, Sent.Collective[]>} */
  const groups = new Map();
  for (const row of rows) {
    const group = groups.get(key(row));
    if (group) group.push(row);
    else groups.set(key(row), [row]);
  }
  return [...groups.values()].map(part);
}

/**
 * @param {Sent.Collective[]} rows
 * @returns {Part}
 */
export function part(rows) {
  /** @type {(of: (row: Sent.Collective) => number) => number} */
  const sum = (of) => rows.reduce((all, row) => all + of(row), 0);
  /** @type {<Value>(of: (row: Sent.Collective) => Value) => Value | null} */
  const same = (of) => (rows.every((row) => of(row) === of(rows[0])) ? of(rows[0]) : null);
  const timed = rows.some(({ seconds }) => seconds !== null);
  return {
    rows,
    kind: same(({ kind }) => kind),
    axes: rows[0].axes,
    size: same(({ group_size: size }) => size),
    count: sum(({ count }) => count),
    sent: sum(({ wire_bytes: sent }) => sent),
    leaving: rows.every(({ network_bytes: bytes }) => bytes !== null)
      ? sum(({ network_bytes: bytes }) => bytes ?? 0)
      : null,
    seconds: timed ? sum(({ seconds }) => seconds ?? 0) : null,
    links: rows.some(({ links }) => (links ?? null) !== null) ? sum(({ links }) => links ?? 0) : null,
    exact: rows.every(({ exact }) => exact),
  };
}

/**
 * `39 more send 12.4 MiB`.
 *
 * @param {Part[]} parts
 */
export const moreSent = (parts) =>
  `${count(parts.length)} more ${parts.length === 1 ? "sends" : "send"} ${bytes(parts.reduce((sum, { sent }) => sum + sent, 0))}`;

/**
 * Whether times are predicted, and what a part weighs: its time, else its bytes.
 *
 * @param {Sent.Collective[]} rows
 * @returns {Weigher}
 */
export function weigher(rows) {
  const timed = rows.some(({ seconds }) => seconds !== null);
  return { timed, weight: timed ? ({ seconds }) => seconds ?? 0 : ({ sent }) => sent };
}

/**
 * By kind and axes, as a line tells them: those over the mesh's first axis first, of them the heaviest.
 *
 * @param {Sent.Collective[]} rows
 * @param {Weigher["weight"]} weight
 */
export function kindsOf(rows, weight) {
  const kinds = merged(rows, ({ kind, axes, group_size: size }) => `${kind} ${axes ?? `groups of ${size}`}`);
  const order = (/** @type {Part} */ { axes }) => axes?.[0] ?? Infinity;
  const before = (/** @type {Part} */ a, /** @type {Part} */ b) => (order(a) === order(b) ? 0 : order(a) - order(b));
  return kinds.sort((a, b) => before(a, b) || weight(b) - weight(a) || b.sent - a.sent);
}

/**
 * The sources that move something and, last, what no line is known of (`source` null). Each has `items`: lines
 * `{source, number, text, part}`, of which `part` is null where nothing moves, and gaps `{gap, lines}`, whose lines are
 * empty where their text is not known.
 *
 * @param {Pick<Sent.Communication, "rows" | "sources">} communication
 */
export function placesOf({ rows, sources }) {
  const named = sources.map((source, i) => ({ ...source, source: i, rows: rows.filter((row) => row.source === i) }));
  const lost = {
    name: "not traced to a line",
    note: null,
    source: null,
    lines: [],
    rows: rows.filter((row) => row.source === null),
  };
  return [...named, lost]
    .filter((place) => place.rows.length)
    .map(({ name, note, source, lines, rows: own }) => ({
      name,
      note,
      source,
      items: folded(linesOf(source, lines, own)),
    }));
}

/**
 * All lines of a source in their order, with those that move something but have no text.
 *
 * @param {number | null} source
 * @param {Sent.Source["lines"]} lines
 * @param {Sent.Collective[]} rows
 */
function linesOf(source, lines, rows) {
  const parts = new Map(merged(rows, ({ line }) => line).map((each) => [each.rows[0].line, each]));
  /** @type {Map<number | null, string | null>} */
  const texts = new Map(lines);
  for (const [number, each] of parts) if (!texts.has(number)) texts.set(number, each.rows[0].text);
  const numbers = [...texts.keys()].sort((a, b) => (a ?? Infinity) - (b ?? Infinity));
  return numbers.map((number) => ({
    source,
    number,
    text: texts.get(number) ?? null,
    part: parts.get(number) ?? null,
  }));
}

/**
 * The lines with gaps: where numbers jump, and of a long source where nothing moves nearby.
 *
 * @param {CodeLine[]} lines
 */
function folded(lines) {
  const moving = lines.flatMap(({ part: moved }, i) => (moved ? [i] : []));
  const near = (/** @type {number} */ i) => lines.length <= WHOLE || moving.some((at) => Math.abs(at - i) <= AROUND);
  /** @type {(CodeLine | Gap)[]} */
  const items = [];
  /** @type {CodeLine[]} */
  let hidden = [];
  const close = () => {
    items.push(...(hidden.length < LEAST ? hidden : [{ gap: hidden.length, lines: hidden }]));
    hidden = [];
  };
  lines.forEach((line, i) => {
    const jump = i && line.text !== null ? (line.number ?? 0) - (lines[i - 1].number ?? 0) - 1 : 0;
    if (jump > 0 || near(i)) close();
    if (jump > 0) items.push({ gap: jump, lines: [] });
    if (near(i)) items.push(line);
    else hidden.push(line);
  });
  close();
  return items;
}

/**
 * `14.3 ms on the links, 12.9 ms hidden`: the title of a time; null where that is not known.
 *
 * @param {Pick<Part, "links" | "seconds">} part
 */
export const hidden = ({ links, seconds: waited }) =>
  links === null
    ? null
    : `${seconds(links)} on the links, ${seconds(Math.max(0, links - (waited ?? 0)))} hidden by compute`;

export const WAITED = "Part of the predicted step: what the device waits for them, all together";

/**
 * The unit that the longest of `times` is told in, seconds of one, and decimals that give it three digits.
 *
 * @param {number[]} times
 */
export function unitOf(times) {
  const longest = Math.max(0, ...times);
  const [unit, size] = longest < 999.5e-6 ? ["us", 1e-6] : longest < 0.9995 ? ["ms", 1e-3] : ["s", 1];
  const number = longest / size;
  return { unit, size, decimals: number >= 99.95 ? 0 : number >= 9.995 ? 1 : 2 };
}

/**
 * `seconds` in that unit: `18.0`, `<0.1`.
 *
 * @param {number} seconds
 * @param {Pick<ReturnType<typeof unitOf>, "size" | "decimals">} unit
 */
export function inUnit(seconds, { size, decimals }) {
  const number = seconds / size;
  const last = 10 ** -decimals;
  return number > 0 && number < last / 2 ? `<${rounded(last, decimals)}` : rounded(number, decimals);
}
