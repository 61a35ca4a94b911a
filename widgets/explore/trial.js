// What is tried: a mesh, a strategy, what was set by hand; kept the same in Python.

import { Selection } from "../shared/selection.js";
import { synced } from "../shared/store.js";

/**
 * `axes` is `[[name, size], ...]`, `wishes` has the cut of an array, the axes of each dimension, by its path; `laid` is
 * the strategy's layout as Python planned it last, `compiled` what the compiler made of a line, null before. None of
 * them is changed in place.
 */
export class Trial extends Selection {
  constructor() {
    super();
    this.set({ axes: [], strategy: "", wishes: {}, laid: null, compiled: null });
  }

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

/** How many devices a mesh of these axes has. */
export const count = (axes) => axes.reduce((n, [, size]) => n * size, 1);

/** Keep `trial` and the widget's model the same; what is returned ends that, its `flush()` tells Python at once. */
export function follow(trial, model, paths) {
  const index = new Map(paths.map((path, i) => [path, i]));
  const given = (name) => () => model.get(name);
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
