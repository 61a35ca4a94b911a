// A view's place in its page: what every bundle's `render` does around its own drawing.

import base from "./base.css";
import { h } from "./dom.js";
import { unpacked } from "./payload.js";
import { followTheme } from "./theme.js";
import tokens from "./tokens.css";

/** @import { Model } from "./store.js" */
/** @typedef {{ model: Model, el: HTMLElement }} Context */

/**
 * Let `draw(root, data, ends)` fill an element of `el` with the `what` that `model` brings, in `styles`; it adds to
 * `ends` what has to be called when the view goes. Nothing of the page changes before it can be drawn, so that the
 * static twin gives way to it in one frame; where it cannot, the twin stays. Returns what takes all away again.
 *
 * @template Data
 * @param {Context} context
 * @param {string} what
 * @param {string[]} styles
 * @param {(root: HTMLElement, data: Data, ends: (() => void)[]) => void} draw
 */
export async function drawn({ model, el }, what, styles, draw) {
  const root = h("div", { class: "jsm" });
  const ends = [() => root.remove()];
  styled(el, styles);
  try {
    const data = await unpacked(model.get("_data"));
    el.append(root);
    ends.push(followTheme(root));
    draw(root, data, ends);
    ends.push(inPlaceOf(model.get("_static"), el));
  } catch (error) {
    el.append(root);
    root.append(
      h("p", { class: "jsm-error" }, `This ${what} could not be drawn: ${/** @type {Error} */ (error).message}`),
    );
    console.error(error);
  }
  return () => ends.forEach((end) => end());
}

/**
 * Each style once per page (or shadow root).
 *
 * @param {HTMLElement} el
 * @param {string[]} styles
 */
function styled(el, styles) {
  const page = el.getRootNode();
  const place = page instanceof ShadowRoot ? page : document.head;
  const style = place.querySelector("style[data-jsm]") ?? place.appendChild(h("style", { "data-jsm": true }));
  const there = new Set(Array.from(style.childNodes, (node) => node.textContent));
  style.append(...[tokens, base, ...styles].filter((text) => !there.has(text)));
}

/**
 * A rule that hides the static twin; returns what takes it away.
 *
 * @param {string | undefined} twin
 * @param {HTMLElement} el
 */
function inPlaceOf(twin, el) {
  const hidden = h("style", {}, twin ? `.${CSS.escape(twin)}{display:none!important}` : "");
  el.append(hidden);
  return () => hidden.remove();
}
