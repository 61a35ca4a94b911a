// A few values that views share and hear of, and the same kept in Python.

const SETTLE = 80; // ms without a change before Python is told

export class Store {
  #listeners = new Set();
  #state;

  constructor(state) {
    this.#state = state;
  }

  get(name) {
    return this.#state[name];
  }

  /** Change values; only what is named changes. */
  set(changes) {
    const names = Object.keys(changes).filter((name) => changes[name] !== this.#state[name]);
    if (!names.length) return;
    for (const name of names) this.#state[name] = changes[name];
    const changed = Object.fromEntries(names.map((name) => [name, true]));
    for (const listener of [...this.#listeners]) listener(changed);
  }

  /** Call `listener(changed)` after each change, with the names of what changed; returns what ends that. */
  on(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }
}

/**
 * Keep `store` and the widget's model the same, both ways; returns what ends that, whose `flush()` tells Python what it
 * was not told yet. `read[name]()` gives a value as the model has it, `told[name]()` one of the store as the model
 * writes it; what is in `read` alone is Python's to say.
 */
export function synced(store, model, read, told) {
  const pending = new Set();
  let timer = null;
  const tell = () => {
    timer = null;
    for (const name of pending) model.set(name, told[name]());
    pending.clear();
    model.save_changes();
  };
  const hear = (name) => () => {
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
    if (timer === null) return;
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
