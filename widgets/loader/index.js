// The `_esm` of every report: small, because it travels with each of them. The views' module text lives in one
// model per kernel and is evaluated once per page.

/** @import { Model } from "../shared/store.js" */

/** @typedef {Model & { widget_manager: { get_model: (id: string) => Promise<Model> } }} HostModel has others */

/**
 * A map that all copies of this module in a page share.
 *
 * @param {string} name
 */
function shared(name) {
  const key = Symbol.for(`jaxshard_magic.${name}`);
  const page = /** @type {Record<symbol, Map<string, any>>} */ (/** @type {unknown} */ (globalThis));
  page[key] ??= new Map();
  return page[key];
}

const modules = shared("modules");

/** @param {HostModel} model */
async function text(model) {
  const id = model.get("_module").slice("IPY_MODEL_".length);
  try {
    const host = await model.widget_manager.get_model(id);
    return { digest: host.get("digest"), text: host.get("text") };
  } catch {
    return asked(model);
  }
}

/**
 * A front end that gives no other model's state: the kernel sends the text in a message.
 *
 * @param {HostModel} model
 */
function asked(model) {
  return new Promise((resolve) => {
    const hear = (/** @type {any} */ message) => {
      if (message?.kind !== "module") return;
      model.off("msg:custom", hear);
      resolve(message);
    };
    model.on("msg:custom", hear);
    model.send({ kind: "module" });
  });
}

/** @param {HostModel} model */
async function loaded(model) {
  const { digest, text: source } = await text(model);
  if (!modules.has(digest)) {
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    modules.set(
      digest,
      import(url).finally(() => URL.revokeObjectURL(url)),
    );
  }
  return modules.get(digest);
}

const ROOM = 640; // px that are kept free, at most, for a view that is on its way; views/show.py keeps as many
const LATE = 5000; // ms after which its twin is shown instead
const held = shared("held"); // what shows a twin again, by its class

/**
 * Keep room in the place of the static twin from the start: it shall not be seen before the view stands there.
 *
 * @param {{ model: HostModel }} context
 */
function initialize({ model }) {
  const twin = model.get("_static");
  if (!twin) return;
  const style = document.createElement("style");
  style.textContent = `.${CSS.escape(twin)}{visibility:hidden;max-height:${ROOM}px;overflow:hidden}`;
  document.head.append(style);
  held.set(twin, () => style.remove());
  setTimeout(release, LATE, twin);
}

/** @param {string} twin */
function release(twin) {
  held.get(twin)?.();
  held.delete(twin);
}

/** @param {{ model: HostModel, el: HTMLElement }} context */
async function render(context) {
  try {
    return await (await loaded(context.model)).render(context);
  } finally {
    release(context.model.get("_static")); // in the frame that shows the view, which hides its twin
  }
}

export default { initialize, render };
