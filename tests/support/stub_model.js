// A page's side of the browser tests: the model that a front end would give a widget, and the widget in a box.

/** Keeps what the widget sets and sends. */
export class Model {
  #listeners = new Map();

  constructor(state) {
    this.state = state;
    this.pending = {};
    this.saved = [];
    this.sent = [];
  }

  get(name) {
    return this.state[name];
  }

  set(name, value) {
    if (this.state[name] === value) return;
    this.state[name] = value;
    this.pending[name] = value;
    this.tell(`change:${name}`);
  }

  save_changes() {
    if (Object.keys(this.pending).length) this.saved.push(this.pending);
    this.pending = {};
  }

  send(content) {
    this.sent.push(content);
  }

  on(event, listener) {
    if (!this.#listeners.has(event)) this.#listeners.set(event, new Set());
    this.#listeners.get(event).add(listener);
  }

  off(event, listener) {
    if (listener) this.#listeners.get(event)?.delete(listener);
    else this.#listeners.delete(event);
  }

  fire(traits) {
    Object.assign(this.state, traits);
    for (const name in traits) this.tell(`change:${name}`);
  }

  get listening() {
    return [...this.#listeners.values()].reduce((sum, all) => sum + all.size, 0);
  }

  tell(event, ...given) {
    for (const listener of [...(this.#listeners.get(event) ?? [])]) listener(...given);
  }
}

// Who listens to the page itself: a widget that was taken away must not.
let onPage = 0;
for (const target of [window, document, document.documentElement, document.body]) {
  const [add, remove] = [target.addEventListener, target.removeEventListener];
  target.addEventListener = (...given) => ((onPage += 1), add.apply(target, given));
  target.removeEventListener = (...given) => ((onPage -= 1), remove.apply(target, given));
}

// What the page will still do by itself, but for what it takes back after more than a second, as "copied".
const [soon, late] = [new Set(), 1000];
const { setTimeout: begin, clearTimeout: cancel } = window;
window.setTimeout = (job, delay = 0, ...given) => {
  const timer = begin(() => (soon.delete(timer), job(...given)), delay);
  if (delay < late) soon.add(timer);
  return timer;
};
window.clearTimeout = (timer) => (soon.delete(timer), cancel(timer));

let [end, before] = [() => {}, 0];

/** Draw `packed`, all of it or the views in `only`, in a page with nothing else but the widget's static twin. */
export async function show(report, { packed, traits, only, width, theme }) {
  await remove();
  document.body.style.margin = 0;
  document.body.style.background = { light: "#fff", dark: "#111" }[theme] ?? "";
  document.body.removeAttribute("data-jp-theme-light");
  if (theme !== null) document.body.setAttribute("data-jp-theme-light", String(theme === "light"));
  const [box, twin] = [document.createElement("main"), document.createElement("p")];
  box.style.width = `${width}px`;
  twin.className = traits._static ?? "twin";
  document.body.replaceChildren(box, twin);
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const state = { _data: new DataView(bytes.buffer), _static: "", leaf: null, device: null, tab: null, ...traits };
  globalThis.model = new Model(state);
  before = onPage;
  end = await report.render({ model: globalThis.model, el: box }, only);
  await drawn();
}

/** Change traits as Python does. */
export async function fire(traits) {
  globalThis.model.fire(traits);
  await drawn();
}

/** Once what waits for its size, or for the next frame, has drawn itself. */
async function drawn() {
  for (let i = 0; i < 2; i += 1) await new Promise(requestAnimationFrame);
}

/** Once the widget has drawn what has changed, and told Python all that it has to tell. */
export async function settled() {
  do await drawn();
  while (soon.size);
}

/** Take the widget away; returns how many listeners it left on the model and the page. */
export async function remove() {
  await end();
  end = () => {};
  return (globalThis.model?.listening ?? 0) + onPage - before;
}
