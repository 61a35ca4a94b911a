// The element that the keyboard is on, by its `data-k`: a part that is drawn anew gets it back.

/**
 * The `data-k` of the element that has the focus, in the page or the shadow root of `element`.
 *
 * @param {Element} element
 */
export function focusedKey(element) {
  const page = /** @type {Document | ShadowRoot} */ (element.getRootNode());
  return /** @type {HTMLElement | null} */ (page.activeElement)?.dataset?.k;
}

/**
 * Focus what in `element` has the `data-k`, if anything has.
 *
 * @param {Element} element
 * @param {string} key
 * @param {FocusOptions} [how]
 */
export function focusIn(element, key, how) {
  /** @type {HTMLElement | null} */
  const found = element.querySelector(`[data-k="${CSS.escape(key)}"]`);
  found?.focus(how);
}
