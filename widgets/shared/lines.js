// Lines of the user's code as other views name them.

const NAMED = /line (\d+)(?: of (.+))?/;

/**
 * The `{source, line}` that a sentence means with `line 12` or `line 12 of model.py`: of the lines with that number the
 * one that sends most; null for none.
 */
export function lineNamed({ rows, sources }, text) {
  const [, number, name] = NAMED.exec(text) ?? [];
  const found = rows.filter(
    ({ source, line }) => source !== null && line === Number(number) && (!name || sources[source].name === name),
  );
  if (!found.length) return null;
  const { source, line } = found.reduce((a, b) => (b.wire_bytes > a.wire_bytes ? b : a));
  return { source, line };
}

/** Whether the communication shows the line: those of a source that moves nothing are not there. */
export const stands = ({ rows, sources }, source, line) =>
  source !== null &&
  rows.some((row) => row.source === source) &&
  (sources[source].lines.some(([number]) => number === line) || rows.some((row) => row.source === source && row.line === line));
