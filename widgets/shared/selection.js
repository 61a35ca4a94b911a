// What is chosen, once for all views of a report, and kept the same in Python.

import { Store, synced } from "./store.js";

/** @import { Position } from "./payload_types.js" */
/** @import { Changed, Model } from "./store.js" */
/** @import { Mesh } from "./mesh.js" */

/**
 * `leaf` is an index, `device` a position in the mesh, `tab` a name; `line` is of the communication's sources and
 * `pointed` the device under the pointer, which Python is not told of.
 *
 * @typedef {object} Selected
 * @property {number | null} leaf
 * @property {Position | null} device
 * @property {string | null} tab
 * @property {{ source: number | null, line: number | null } | null} line
 * @property {Position | null} pointed
 */

/**
 * @template {Selected} [State=Selected]
 * @extends {Store<State>}
 */
export class Selection extends Store {
  /** @param {Partial<State>} [from] */
  constructor(from) {
    super(/** @type {State} */ ({ leaf: null, device: null, tab: null, line: null, pointed: null, ...from }));
  }

  get leaf() {
    return this.get("leaf");
  }

  get device() {
    return this.get("device");
  }

  get tab() {
    return this.get("tab");
  }

  get line() {
    return this.get("line");
  }

  get pointed() {
    return this.get("pointed");
  }

  /** The device to show: the one under the pointer, else the chosen one. */
  get shown() {
    return this.pointed ?? this.device;
  }

  /**
   * Choose; only what is named changes.
   *
   * @param {Partial<Selected>} changes
   */
  select(changes) {
    this.set(/** @type {Partial<State>} */ (changes));
  }

  /**
   * Point at the device at `position`, null for none.
   *
   * @param {Position | null} position
   */
  point(position) {
    this.select({ pointed: position });
  }
}

/**
 * Keep `selection` and the widget's model the same, both ways; returns what ends that. `first`: the tab of no choice.
 *
 * @param {Selection} selection
 * @param {Model} model
 * @param {Mesh} mesh
 * @param {string[]} paths
 * @param {string | null} first
 */
export function follow(selection, model, mesh, paths, first) {
  const index = new Map(paths.map((path, i) => [path, i]));
  const read = {
    leaf: () => index.get(model.get("leaf")) ?? null,
    device: () => mesh.find(model.get("device")),
    tab: () => model.get("tab") ?? first,
  };
  const told = {
    leaf: () => (selection.leaf === null ? null : paths[selection.leaf]),
    device: () => (selection.device === null ? null : mesh.devices[selection.device]),
    tab: () => selection.tab,
  };
  return synced(selection, model, read, told);
}
