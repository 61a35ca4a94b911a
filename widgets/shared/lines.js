// Lines of the user's code as other views name them.

/** @import * as Sent from "./payload_types.js" */

const NAMED = /^(?:(.+), )?line (\d+)$/;

/**
 * The `{source, line}` that a sentence means with `cell [3], line 12` or `line 12`: of the lines with that number the
 * one that sends most; null for one that the communication does not show.
 *
 * @param {Pick<Sent.Communication, "rows" | "sources">} communication
 * @param {string} text
 */
export function lineNamed({ rows, sources }, text) {
  const [, name, number] = NAMED.exec(text) ?? [];
  const found = rows.filter(
    ({ source, line }) => source !== null && line === Number(number) && (!name || sources[source].name === name),
  );
  if (found.length) {
    const { source, line } = found.reduce((a, b) => (b.wire_bytes > a.wire_bytes ? b : a));
    return { source, line };
  }
  const source = sources.findIndex((each) => !name || each.name === name);
  return stands({ rows, sources }, source, Number(number)) ? { source, line: Number(number) } : null;
}

/**
 * Whether the communication shows the line: those of a source that moves nothing are not there.
 *
 * @param {Pick<Sent.Communication, "rows" | "sources">} communication
 * @param {number | null} source
 * @param {number | null} line
 */
export const stands = ({ rows, sources }, source, line) =>
  source !== null &&
  rows.some((row) => row.source === source) &&
  (sources[source].lines.some(([number]) => number === line) ||
    rows.some((row) => row.source === source && row.line === line));
