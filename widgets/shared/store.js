// A few values that views share and hear of, and the same kept in Python.

const SETTLE = 80; // ms without a change before Python is told

/**
 * The model of a widget, as anywidget gives it.
 *
 * @typedef {object} Model
 * @property {(name: string) => any} get
 * @property {(name: string, value: unknown) => void} set
 * @property {() => void} save_changes
 * @property {(event: string, listener: (...given: any[]) => void) => void} on
 * @property {(event: string, listener: (...given: any[]) => void) => void} off
 * @property {(message: Record<string, unknown>) => void} send
 */

/**
 * The names of what changed.
 *
 * @template State
 * @typedef {{ [Name in keyof State]?: true }} Changed
 */

/** @template {object} State */
export class Store {
  /** @type {Set<(changed: Changed<State>) => void>} */
  #listeners = new Set();
  #state;

  /** @param {State} state */
  constructor(state) {
    this.#state = state;
  }

  /**
   * @template {keyof State} Name
   * @param {Name} name
   */
  get(name) {
    return this.#state[name];
  }

  /**
   * Change values; only what is named changes.
   *
   * @param {Partial<State>} changes
   */
  set(changes) {
    const names = /** @type {(keyof State)[]} */ (Object.keys(changes)).filter(
      (name) => changes[name] !== this.#state[name],
    );
    if (!names.length) return;
    Object.assign(this.#state, changes);
    const changed = /** @type {Changed<State>} */ (Object.fromEntries(names.map((name) => [name, true])));
    for (const listener of [...this.#listeners]) listener(changed);
  }

  /**
   * Call `listener(changed)` after each change, with the names of what changed; returns what ends that.
   *
   * @param {(changed: Changed<State>) => unknown} listener
   */
  on(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/**
 * Keep `store` and the widget's model the same, both ways; returns what ends that, whose `flush()` tells Python what it
 * was not told yet. `read[name]()` gives a value as the model has it, `told[name]()` one of the store as the model
 * writes it; what is in `read` alone is Python's to say.
 *
 * @param {Store<any>} store
 * @param {Model} model
 * @param {Record<string, () => unknown>} read
 * @param {Record<string, () => unknown>} told
 */
export function synced(store, model, read, told) {
  /** @type {Set<string>} */
  const pending = new Set();
  /** @type {number | undefined} */
  let timer;
  const tell = () => {
    timer = undefined;
    for (const name of pending) model.set(name, told[name]());
    pending.clear();
    model.save_changes();
  };
  const hear = (/** @type {string} */ name) => () => {
    if (!pending.has(name)) store.set({ [name]: read[name]() });
  };
  const heard = Object.fromEntries(Object.keys(read).map((name) => [name, hear(name)]));
  store.set(Object.fromEntries(Object.keys(read).map((name) => [name, read[name]()])));
  for (const name in heard) model.on(`change:${name}`, heard[name]);
  const off = store.on((names) => {
    for (const name in told) if (names[name] && told[name]() !== model.get(name)) pending.add(name);
    if (!pending.size) return;
    clearTimeout(timer);
    timer = setTimeout(tell, SETTLE);
  });
  const flush = () => {
    if (timer === undefined) return;
    clearTimeout(timer);
    tell();
  };
  const end = () => {
    off();
    flush();
    for (const name in heard) model.off(`change:${name}`, heard[name]);
  };
  return Object.assign(end, { flush });
}
