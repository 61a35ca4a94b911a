// A document of its own with widgets in it: what a notebook's front end gives a widget, the page gives here. It runs
// without a kernel and without a network; where it fails, the HTML stands that the document has as well.

import { h } from "../shared/dom.js";
import { inflated } from "../shared/payload.js";

/** @typedef {(...given: any[]) => void} Listener */

/**
 * What views/widget_page.py puts into the document: a bundle's text by its name, deflated, and the widgets.
 *
 * @typedef {object} Page
 * @property {Record<string, string>} modules
 * @property {{ bundle: string, title: string, data: string, state: Record<string, unknown>, pictures: string }[]} views
 */

/** What a widget takes for its model. Nobody hears what it tells but itself; `_alone` says so. */
class Model {
  /** @type {Map<string, Set<Listener>>} */
  #listeners = new Map();
  /** @type {Record<string, any>} */
  #state;
  #pictures;

  /**
   * @param {Record<string, unknown>} state
   * @param {string} pictures
   */
  constructor(state, pictures) {
    this.#state = { ...state, _alone: true };
    this.#pictures = pictures;
  }

  /** @param {string} name */
  get(name) {
    return this.#state[name];
  }

  /**
   * @param {string} name
   * @param {unknown} value
   */
  set(name, value) {
    if (this.#state[name] === value) return;
    this.#state[name] = value;
    this.#tell(`change:${name}`);
  }

  save_changes() {}

  /**
   * @param {string} event
   * @param {Listener} listener
   */
  on(event, listener) {
    this.#listeners.set(event, (this.#listeners.get(event) ?? new Set()).add(listener));
  }

  /**
   * @param {string} event
   * @param {Listener} listener
   */
  off(event, listener) {
    this.#listeners.get(event)?.delete(listener);
  }

  /**
   * A question that the kernel would be asked: the document has the pictures.
   *
   * @param {{ kind: string, name: string, theme: string }} question
   */
  async send({ kind, name, theme }) {
    if (kind !== "picture") return;
    const pictures = JSON.parse(await inflated(bytes(this.#pictures)));
    this.#tell("msg:custom", { kind, name, theme, text: pictures[theme][name] });
  }

  /**
   * @param {string} event
   * @param {...(any)} given
   */
  #tell(event, ...given) {
    for (const listener of [...(this.#listeners.get(event) ?? [])]) listener(...given);
  }
}

/** @param {string} packed */
const bytes = (packed) => Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));

/**
 * The module of each bundle, made once.
 *
 * @param {Record<string, string>} packed
 */
function loader(packed) {
  const made = new Map();
  const load = async (/** @type {string} */ name) => {
    const url = URL.createObjectURL(new Blob([await inflated(bytes(packed[name]))], { type: "text/javascript" }));
    return import(url).finally(() => URL.revokeObjectURL(url));
  };
  return (/** @type {string} */ name) => {
    if (!made.has(name)) made.set(name, load(name));
    return made.get(name);
  };
}

/**
 * @param {Element} place
 * @param {Page} page
 */
async function show(place, { modules, views }) {
  const module = loader(modules);
  for (const { bundle, title, data, state, pictures } of views) {
    const el = h("div", {});
    const draw = async () =>
      (await module(bundle)).render({ model: new Model({ ...state, _data: bytes(data) }, pictures), el });
    if (title) {
      const folded = h("details", {}, h("summary", {}, h("b", {}, title)), el);
      folded.addEventListener("toggle", draw, { once: true });
      place.append(folded);
    } else {
      place.append(el);
      await draw();
    }
  }
}

/** Tell the page that has this one in a frame how high it is, now and whenever that changes, and be light or dark as
 * that page says. */
function inFrame() {
  const root = document.documentElement;
  addEventListener("message", ({ data, source }) => {
    if (source === parent && data?.kind === "jaxshard theme") root.setAttribute("theme", data.theme);
  });
  const tell = () => parent.postMessage({ kind: "jaxshard height", height: root.offsetHeight }, "*");
  new ResizeObserver(tell).observe(root);
}

window.onerror = null; // of a browser that can't read this; from here on what fails is caught
if (parent !== window) inFrame();
try {
  const place = /** @type {Element} */ (document.querySelector(".jsm-views"));
  await show(place, JSON.parse(/** @type {Element} */ (document.getElementById("jsm-page")).textContent));
} catch (error) {
  document.documentElement.className = "";
  console.error(error);
}
