// A list that scrolls by itself must not hold the page: a browser keeps the gesture of a wheel with the list in which it
// began, even where that is at its end.

const LINE = 16; // px of a wheel's step where a browser tells lines

/**
 * Let what is around `box` scroll on where `box` itself is at its end.
 *
 * @param {HTMLElement} box
 */
export function scrollsOn(box) {
  box.addEventListener(
    "wheel",
    (event) => {
      const way = event.deltaY * [1, LINE, box.clientHeight][event.deltaMode];
      if (!way || event.ctrlKey || event.shiftKey || roomIn(box, way)) return;
      const around = scrollerAround(box, way);
      if (!around) return;
      if (event.cancelable) event.preventDefault(); // else the browser may scroll it, too
      around.scrollTop += way;
    },
    { passive: false },
  );
}

/**
 * @param {Element} box
 * @param {number} way
 */
const roomIn = ({ scrollTop, clientHeight, scrollHeight }, way) =>
  way < 0 ? scrollTop > 0 : scrollTop + clientHeight < scrollHeight - 1;

/**
 * The nearest element around `box` that scrolls and has room that way; null for none.
 *
 * @param {Element} box
 * @param {number} way
 */
function scrollerAround(box, way) {
  const page = document.scrollingElement;
  for (let at = above(box); at && at !== page; at = above(at)) {
    if (/auto|scroll/.test(getComputedStyle(at).overflowY) && roomIn(at, way)) return at;
  }
  return page && roomIn(page, way) ? page : null;
}

/** @param {Element} node */
const above = (node) => node.parentElement ?? /** @type {Partial<ShadowRoot>} */ (node.getRootNode()).host ?? null;
