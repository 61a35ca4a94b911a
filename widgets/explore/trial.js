// What is tried: a mesh, a strategy, what was set by hand; kept the same in Python.

import { Selection } from "../shared/selection.js";
import { synced } from "../shared/store.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Selected } from "../shared/selection.js" */
/** @import { Model } from "../shared/store.js" */

/**
 * `wishes` has the cut of an array by its path; `laid` is the strategy's layout as Python planned it last, `compiled`
 * what the compiler made of a line, null before, "asked" while it does. None of them is changed in place.
 *
 * @typedef {Omit<Sent.ExplorerState, "compiled"> & { compiled: Sent.Compiled | "asked" | null }} Tried
 * @typedef {Sent.ExplorerState["axes"]} Axes
 */

/** @extends {Selection<Selected & Tried>} */
export class Trial extends Selection {
  get axes() {
    return this.get("axes");
  }

  get strategy() {
    return this.get("strategy");
  }

  get wishes() {
    return this.get("wishes");
  }

  get laid() {
    return this.get("laid");
  }

  get compiled() {
    return this.get("compiled");
  }

  get sizes() {
    return new Map(this.axes);
  }

  get devices() {
    return count(this.axes);
  }
}

/**
 * How many devices a mesh of these axes has.
 *
 * @param {Axes} axes
 */
export const count = (axes) => axes.reduce((n, [, size]) => n * size, 1);

/**
 * Keep `trial` and the widget's model the same; what is returned ends that, its `flush()` tells Python at once.
 *
 * @param {Trial} trial
 * @param {Model} model
 * @param {string[]} paths
 */
export function follow(trial, model, paths) {
  const index = new Map(paths.map((path, i) => [path, i]));
  const given = (/** @type {string} */ name) => () => model.get(name);
  const told = {
    axes: () => trial.axes,
    strategy: () => trial.strategy,
    wishes: () => trial.wishes,
    leaf: () => (trial.leaf === null ? null : paths[trial.leaf]),
    device: () => trial.device,
  };
  const read = {
    axes: given("axes"),
    strategy: given("strategy"),
    wishes: given("wishes"),
    leaf: () => index.get(model.get("leaf")) ?? null,
    device: () => (model.get("device") < count(model.get("axes")) ? model.get("device") : null),
    laid: given("laid"),
    compiled: given("compiled"),
  };
  return synced(trial, model, read, told);
}
