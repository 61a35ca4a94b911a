// A cell below this one, with source and never run: by JupyterLab's or Notebook 7's own document, or the classic one's.

/** @import { Model } from "../shared/store.js" */

/**
 * `(source) => ` whether it is there now; null where the page can't. A cell that it wrote before, and that nobody
 * changed since, gets the new source.
 *
 * @param {Model & { widget_manager?: any }} model of the page's own, which has more than anywidget tells
 * @param {HTMLElement} el
 */
export function nextCell(model, el) {
  const document = model.widget_manager?.context?.model;
  if (typeof document?.sharedModel?.insertCell === "function")
    return (/** @type {string} */ source) => intoShared(model, document, source);
  const classic = /** @type {any} */ (globalThis).Jupyter?.notebook;
  return typeof classic?.insert_cell_below === "function"
    ? (/** @type {string} */ source) => intoClassic(classic, el, source)
    : null;
}

const written = new Map(); // by the id of the view: the id of the cell, and what was written into it

/**
 * @param {Model} model
 * @param {any} document
 * @param {string} source
 */
function intoShared(model, { cells, sharedModel }, source) {
  const id = model.get("_static").replace("jsm-static-", "");
  const last = written.get(id);
  const there =
    last &&
    sharedModel.cells.find((/** @type {any} */ cell) => cell.id === last.cell && cell.getSource() === last.source);
  if (there) there.setSource(source);
  const at = there ? 0 : [...cells].findIndex((cell) => shows(cell, id));
  if (at < 0) return false;
  const cell = there ?? sharedModel.insertCell(at + 1, { cell_type: "code", source, metadata: {} });
  written.set(id, { cell: cell.id, source });
  return true;
}

/**
 * Whether a cell's outputs have the view of that id.
 *
 * @param {any} cell
 * @param {string} id
 */
const shows = (cell, id) => JSON.stringify(cell.toJSON().outputs ?? []).includes(id);

/**
 * @param {any} notebook
 * @param {HTMLElement} el
 * @param {string} source
 */
function intoClassic(notebook, el, source) {
  const at = notebook.get_cells().findIndex((/** @type {any} */ cell) => cell.element[0].contains(el));
  if (at < 0) return false;
  notebook.insert_cell_below("code", at).set_text(source);
  return true;
}
