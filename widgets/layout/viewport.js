// The rows in view as elements, each used again for another row once its own has left the view.

const BEYOND = 8; // rows kept above and below those in view

/** @import { Row } from "./rows.js" */

/**
 * Rows of known heights in `space`, scrolled by `box`. `make()` gives a slot, an object with an `element`;
 * `fill(slot, row, top)` makes it a row that begins `top` px down.
 *
 * @template {{ element: HTMLElement }} Slot
 * @param {HTMLElement} box
 * @param {HTMLElement} space
 * @param {() => Slot} make
 * @param {(slot: Slot, row: Row, top: number) => void} fill
 */
export function viewport(box, space, make, fill) {
  /** @type {Map<string, Slot>} */
  const shown = new Map(); // slots by the keys of their rows
  /** @type {Slot[]} */
  const spare = [];
  /** @type {Row[]} */
  let rows = [];
  /** @type {Map<string | null, number>} */
  let places = new Map();
  let starts = [0]; // px at which each row begins, and the end of the last
  let height = 0; // px of all rows
  /** @type {number[]} */
  let headers = [];

  /** @param {Row[]} all */
  function list(all) {
    rows = all;
    places = new Map(rows.map((row, i) => [row.key, i]));
    starts = [0];
    height = 0;
    for (const row of rows) {
      height += row.height;
      starts.push(height);
    }
    headers = rows.flatMap((row, i) => (row.kind === "role" ? [i] : []));
    for (const rowKey of [...shown.keys()]) put(rowKey);
    space.style.height = `${height}px`;
    box.style.setProperty("--jsm-tree-height", `${height + 1}px`);
  }

  /**
   * Draw the rows in view, and the one of `kept`, which stays in the page wherever it is; returns the header of the
   * first row in view, null where that header is in view itself.
   *
   * @param {string | null} kept
   * @returns {Row | null}
   */
  function draw(kept) {
    const { scrollTop, clientHeight } = box; // read before anything changes: reading lays the page out
    const from = Math.max(0, before(scrollTop) - BEYOND);
    const to = Math.min(rows.length, before(scrollTop + clientHeight) + 1 + BEYOND);
    const wanted = Array.from({ length: to - from }, (_, i) => from + i);
    const at = place(kept);
    if (at >= 0 && at < from) wanted.unshift(at);
    if (at >= to) wanted.push(at);
    const keys = new Set(wanted.map((i) => rows[i].key));
    for (const rowKey of [...shown.keys()]) if (!keys.has(rowKey)) put(rowKey);
    let next = space.firstChild; // elements stand in the order of the rows, as they are read aloud
    for (const i of wanted) {
      const element = (shown.get(rows[i].key) ?? take(i)).element;
      if (element === next) next = next.nextSibling;
      else space.insertBefore(element, next);
    }
    const above = headers.findLast((i) => starts[i] <= scrollTop);
    return above === undefined || starts[above] === scrollTop ? null : rows[above];
  }

  /** @param {string} rowKey */
  function put(rowKey) {
    const slot = /** @type {Slot} */ (shown.get(rowKey));
    slot.element.remove();
    shown.delete(rowKey);
    spare.push(slot);
  }

  /** @param {number} i */
  function take(i) {
    const slot = spare.pop() ?? make();
    shown.set(rows[i].key, slot);
    fill(slot, rows[i], starts[i]);
    return slot;
  }

  /**
   * Scroll until the row is below the header that stays on top, and above the lower edge.
   *
   * @param {string | null} rowKey
   */
  function reveal(rowKey) {
    const at = place(rowKey);
    if (at < 0 || !box.clientHeight) return;
    const header = rows[at].kind === "role" ? 0 : rows[headers[0]].height;
    if (starts[at] < box.scrollTop + header) box.scrollTop = starts[at] - header;
    else if (starts[at + 1] > box.scrollTop + box.clientHeight) box.scrollTop = starts[at + 1] - box.clientHeight;
  }

  const place = (/** @type {string | null} */ rowKey) => places.get(rowKey) ?? -1;

  /**
   * Call `each(slot, row)` for the rows in the page.
   *
   * @param {(slot: Slot, row: Row) => void} call
   */
  const each = (call) => shown.forEach((slot, rowKey) => call(slot, rows[place(rowKey)]));

  /**
   * The row whose element has `node` in it.
   *
   * @param {Node} node
   */
  function rowOf(node) {
    for (const [rowKey, slot] of shown) if (slot.element.contains(node)) return rows[place(rowKey)];
    return null;
  }

  /**
   * The last row that begins at or before `y`.
   *
   * @param {number} y
   */
  function before(y) {
    let [low, high] = [0, Math.max(0, rows.length - 1)];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= y) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  return { list, draw, reveal, place, each, rowOf };
}
