// Which trials are chosen: one, and another to see beside it. Positions, null for none.

import { Store, synced } from "../shared/store.js";

/** @import { Model } from "../shared/store.js" */
/** @typedef {{ chosen: number | null, other: number | null, pointed: number | null }} Chosen */

/**
 * `pointed` is the trial under the pointer, which Python is not told of.
 *
 * @extends {Store<Chosen>}
 */
export class Choice extends Store {
  constructor() {
    super({ chosen: null, other: null, pointed: null });
  }

  get chosen() {
    return this.get("chosen");
  }

  get other() {
    return this.get("other");
  }

  get pointed() {
    return this.get("pointed");
  }

  /** Both of a pair, null where there is none. */
  get pair() {
    const { chosen, other } = this;
    return chosen === null || other === null || chosen === other ? null : [chosen, other];
  }

  /**
   * Choose a trial; the other one of a pair changes places with it.
   *
   * @param {number} trial
   */
  choose(trial) {
    this.set(trial === this.other ? { chosen: trial, other: this.chosen } : { chosen: trial });
  }

  /**
   * Put a trial beside the chosen one, or take it away from there.
   *
   * @param {number} trial
   */
  compare(trial) {
    if (this.chosen === null) this.choose(trial);
    else if (trial !== this.chosen) this.set({ other: trial === this.other ? null : trial });
  }

  /** Take back what was chosen last. */
  back() {
    this.set(this.other === null ? { chosen: null } : { other: null });
  }

  /** @param {number | null} trial */
  point(trial) {
    this.set({ pointed: trial });
  }
}

/**
 * Keep `choice` and the widget's model the same, both ways; returns what ends that.
 *
 * @param {Choice} choice
 * @param {Model} model
 * @param {number} count
 */
export function follow(choice, model, count) {
  const read = (/** @type {string} */ name) => () => {
    const value = model.get(name);
    return Number.isInteger(value) && value >= 0 && value < count ? value : null;
  };
  return synced(
    choice,
    model,
    { chosen: read("chosen"), other: read("other") },
    { chosen: () => choice.chosen, other: () => choice.other },
  );
}

/**
 * A click or the Enter key on a trial, with Shift for the second of a pair.
 *
 * @param {Choice} choice
 * @param {number} trial
 * @param {MouseEvent | KeyboardEvent} event
 */
export const pick = (choice, trial, { shiftKey }) => (shiftKey ? choice.compare(trial) : choice.choose(trial));
