// Elements from plain calls. Text is always a text node: a leaf named "<script>" is shown as such.

const SVG = "http://www.w3.org/2000/svg";

/**
 * What an element may have in it; nothing of null, undefined and false.
 *
 * @typedef {Node | string | number | null | undefined | false | Child[]} Child
 */

/**
 * Attributes, properties of `style`, and what hears an event.
 *
 * @typedef {{
 *   onclick?: (event: MouseEvent) => unknown,
 *   onmousedown?: (event: MouseEvent) => unknown,
 *   onkeydown?: (event: KeyboardEvent) => unknown,
 *   onpointerdown?: (event: PointerEvent) => unknown,
 *   onpointermove?: (event: PointerEvent) => unknown,
 *   onpointerup?: (event: PointerEvent) => unknown,
 *   [name: string]: any,
 * }} Attributes
 */

/**
 * An HTML element: `h("button", {class: "jsm-button", onclick}, "copy")`.
 *
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/**
 * An SVG element.
 *
 * @template {keyof SVGElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Attributes} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[Tag]}
 */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/**
 * @template {HTMLElement | SVGElement} Made
 * @param {Made} node
 * @param {Attributes | undefined} attributes
 * @param {Child[]} children
 */
function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style" && typeof value === "object") setStyle(node, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  return append(node, children);
}

/**
 * @param {HTMLElement | SVGElement} node
 * @param {Record<string, any>} style
 */
function setStyle(node, style) {
  for (const [name, value] of Object.entries(style)) {
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else Object.assign(node.style, { [name]: value });
  }
}

/**
 * @template {Element} Parent
 * @param {Parent} node
 * @param {Child[]} children
 */
function append(node, children) {
  for (const child of /** @type {any[]} */ (children).flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

/**
 * `node` with nothing but `children` in it.
 *
 * @template {Element} Parent
 * @param {Parent} node
 * @param {...Child} children
 */
export function replace(node, ...children) {
  node.replaceChildren();
  return append(node, children);
}

let made = 0;

/**
 * An id no other element of the page has, for patterns and labels.
 *
 * @param {string} what
 */
export const uniqueId = (what) => `jsm-${what}-${Date.now().toString(36)}-${++made}`;
