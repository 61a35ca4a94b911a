// What is chosen, once for all views of a report, and kept the same in Python.

const SETTLE = 80; // ms without a change before Python is told

/**
 * `leaf` is an index, `device` a position in the mesh, `tab` a name; `line` is `{source, line}` of the communication's
 * sources and `pointed` the device under the pointer, which Python is not told of.
 */
export class Selection {
  #listeners = new Set();
  #state;

  constructor({ leaf = null, device = null, tab = null } = {}) {
    this.#state = { leaf, device, tab, line: null, pointed: null };
  }

  get leaf() {
    return this.#state.leaf;
  }

  get device() {
    return this.#state.device;
  }

  get tab() {
    return this.#state.tab;
  }

  get line() {
    return this.#state.line;
  }

  get pointed() {
    return this.#state.pointed;
  }

  /** The device to show: the one under the pointer, else the chosen one. */
  get shown() {
    return this.pointed ?? this.device;
  }

  /** Choose; only what is named changes. */
  select(changes) {
    this.#set(changes);
  }

  /** Point at the device at `position`, null for none. */
  point(position) {
    this.#set({ pointed: position });
  }

  /** Call `listener(changed)` after each change, with the names of what changed; returns what ends that. */
  on(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #set(changes) {
    const names = Object.keys(changes).filter((name) => changes[name] !== this.#state[name]);
    if (!names.length) return;
    for (const name of names) this.#state[name] = changes[name];
    const changed = Object.fromEntries(names.map((name) => [name, true]));
    for (const listener of [...this.#listeners]) listener(changed);
  }
}

/** Keep `selection` and the widget's model the same, both ways; returns what ends that. */
export function follow(selection, model, mesh, paths) {
  const index = new Map(paths.map((path, i) => [path, i]));
  const read = {
    leaf: () => index.get(model.get("leaf")) ?? null,
    device: () => mesh.find(model.get("device")),
    tab: () => model.get("tab"),
  };
  const told = {
    leaf: () => (selection.leaf === null ? null : paths[selection.leaf]),
    device: () => (selection.device === null ? null : mesh.devices[selection.device]),
    tab: () => selection.tab,
  };
  const pending = new Set();
  let timer = null;
  const tell = () => {
    timer = null;
    for (const name of pending) model.set(name, told[name]());
    pending.clear();
    model.save_changes();
  };
  const hear = (name) => () => {
    if (!pending.has(name)) selection.select({ [name]: read[name]() });
  };
  const heard = Object.fromEntries(Object.keys(read).map((name) => [name, hear(name)]));
  const changed = Object.fromEntries(Object.keys(read).map((name) => [name, read[name]()]));
  selection.select(changed);
  for (const name in heard) model.on(`change:${name}`, heard[name]);
  const off = selection.on((names) => {
    for (const name in told) if (names[name] && told[name]() !== model.get(name)) pending.add(name);
    if (!pending.size) return;
    clearTimeout(timer);
    timer = setTimeout(tell, SETTLE);
  });
  return () => {
    off();
    if (timer !== null) {
      clearTimeout(timer);
      tell();
    }
    for (const name in heard) model.off(`change:${name}`, heard[name]);
  };
}
