// A view's place in its page: what every bundle's `render` does around its own drawing.

import base from "./base.css";
import { h } from "./dom.js";
import { unpacked } from "./payload.js";
import { followTheme } from "./theme.js";
import tokens from "./tokens.css";

/**
 * Let `draw(root, data, ends)` fill an element of `el` with the `what` that `model` brings, in `styles`; it adds to `ends` what has
 * to be called when the view goes. Returns what takes all away again.
 */
export async function drawn({ model, el }, what, styles, draw) {
  const root = h("div", { class: "jsm" });
  el.append(root);
  const ends = [styled(el, model, styles), followTheme(root), () => root.remove()];
  try {
    draw(root, await unpacked(model.get("_data")), ends);
  } catch (error) {
    root.append(h("p", { class: "jsm-error" }, `This ${what} could not be drawn: ${error.message}`));
    console.error(error);
  }
  return () => ends.forEach((end) => end());
}

/** Each style once per page (or shadow root), and a rule that hides the static twin while this view lives. */
function styled(el, model, styles) {
  const page = el.getRootNode();
  const place = page instanceof ShadowRoot ? page : document.head;
  const style = place.querySelector("style[data-jsm]") ?? place.appendChild(h("style", { "data-jsm": true }));
  const there = new Set(Array.from(style.childNodes, (node) => node.data));
  style.append(...[tokens, base, ...styles].filter((text) => !there.has(text)));
  const twin = model.get("_static");
  const hidden = h("style", {}, twin ? `.${CSS.escape(twin)}{display:none!important}` : "");
  el.append(hidden);
  return () => hidden.remove();
}
