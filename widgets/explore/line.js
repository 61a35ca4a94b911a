// The line for the cell: the same as explorer/line.py, and held to the same cases.

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Axes } from "./trial.js" */

/**
 * `P(None, ('data', 'model'))`, without the Nones at its end.
 *
 * @param {Sent.Cut} cut
 */
export function specText(cut) {
  const entries = cut.map((axes) => {
    const names = axes.map((axis) => `'${axis}'`);
    return names.length > 1 ? `(${names.join(", ")})` : (names[0] ?? "None");
  });
  while (entries.at(-1) === "None") entries.pop();
  return `P(${entries.join(", ")})`;
}

/**
 * The shortest expression that finds `path`, and of all `paths` no other but those in `alike`, a Set.
 *
 * @param {string} path
 * @param {string[]} paths
 * @param {Set<string>} alike
 */
export function pattern(path, paths, alike) {
  const plain = path.replace(/[[\](){}*+?^$|\\]/g, "\\$&").replaceAll('"', ".");
  for (const expression of [plain, `${plain}$`, `^${plain}$`]) {
    const find = new RegExp(expression);
    if (paths.every((other) => other === path || alike.has(other) || !find.test(other))) return expression;
  }
  return `^${plain.replaceAll(".", "\\.")}$`;
}

/**
 * The mesh as it is written: `data=4 model=2`, `v5e:4x4 data=16`.
 *
 * @param {Axes} axes
 * @param {string} madeOf
 */
export function meshText(axes, madeOf) {
  const sizes = axes.map(([axis, size]) => `${axis}=${size}`).join(" ");
  const devices = axes.reduce((n, [, size]) => n * size, 1);
  return madeOf === "" ? sizes : `${madeOf === "cpu" ? `cpu:${devices}` : madeOf} ${sizes}`;
}

/**
 * `rules` by their expression and `specs` by path: `[[name, cut], ...]`; `own` is what the line has beside them.
 *
 * @param {Sent.ExploredLine} own
 * @param {string} strategy
 * @param {string} mesh
 * @param {[expression: string, cut: Sent.Cut][]} rules
 * @param {[path: string, cut: Sent.Cut][]} specs
 */
export function lineText(own, strategy, mesh, rules, specs) {
  const written = new Set(rules.map(([expression]) => expression));
  const kept = own.rules.filter((text) => !written.has(text.slice(0, Math.max(0, text.lastIndexOf("=P(")))));
  const assigned = (/** @type {[name: string, cut: Sent.Cut]} */ [name, cut]) => `${name}=${specText(cut)}`;
  return [
    `%%shard ${strategy}`,
    ...(mesh === own.home ? [] : [`--mesh "${mesh}"`]),
    ...own.kept,
    ...[...rules.map(assigned), ...kept].map((text) => `--rule "${text}"`),
    ...specs.map((each) => `--spec "${assigned(each)}"`),
  ].join(" ");
}
