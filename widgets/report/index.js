// A report in a notebook: the header, and tabs that each show one view. One selection for all of them.

import communication from "../communication/communication.css";
import { view as communicationView } from "../communication/index.js";
import source from "../communication/source.css";
import header from "../header/header.css";
import { view as headerView } from "../header/index.js";
import detail from "../layout/detail.css";
import layout from "../layout/layout.css";
import { view as layoutView } from "../layout/index.js";
import memory from "../memory/memory.css";
import { view as memoryView } from "../memory/index.js";
import { view as pipelineView } from "../pipeline/index.js";
import pipeline from "../pipeline/pipeline.css";
import base from "../shared/base.css";
import { h } from "../shared/dom.js";
import { Mesh } from "../shared/mesh.js";
import { Selection, follow } from "../shared/selection.js";
import { followTheme } from "../shared/theme.js";
import tokens from "../shared/tokens.css";
import { unpacked } from "./payload.js";
import report from "./report.css";
import { tabs } from "./tabs.js";

export * as format from "../shared/format.js";

const STYLE = [tokens, base, report, header, layout, detail, memory, communication, source, pipeline].join("\n");
const VIEWS = { layout: layoutView, memory: memoryView, communication: communicationView, pipeline: pipelineView };

/**
 * Draw the report of `model` in `el`, all of it or the parts named in `only` ("header", "layout", ...); returns
 * what takes it away again.
 */
export async function render({ model, el }, only = null) {
  const root = h("div", { class: "jsm" });
  el.append(root);
  const ends = [styled(el, model), followTheme(root), () => root.remove()];
  try {
    const data = await unpacked(model.get("_data"));
    if (!data.tabs) {
      root.append(pipelineView(data)); // a schedule shown by itself
      return () => ends.forEach((end) => end());
    }
    const mesh = new Mesh(data.mesh);
    const selection = new Selection({ tab: data.tabs[0]?.id ?? null });
    ends.push(follow(selection, model, mesh, data.leaves.path));
    draw(root, data, mesh, selection, only);
  } catch (error) {
    root.append(h("p", { class: "jsm-error" }, `This report could not be drawn: ${error.message}`));
    console.error(error);
  }
  return () => ends.forEach((end) => end());
}

function draw(root, data, mesh, selection, only) {
  const shown = (name) => only === null || only.includes(name);
  if (shown("header")) root.append(headerView(data, mesh, selection));
  const listed = data.tabs.filter((tab) => shown(tab.id));
  if (listed.length) root.append(tabs(listed, selection, (id) => VIEWS[id](data, mesh, selection)));
}

/** The style once per page (or shadow root), and a rule that hides the static twin while this view lives. */
function styled(el, model) {
  const page = el.getRootNode();
  const place = page instanceof ShadowRoot ? page : document.head;
  const style = place.querySelector("style[data-jsm]") ?? place.appendChild(h("style", { "data-jsm": true }));
  if (style.textContent !== STYLE) style.textContent = STYLE; // an older version's, in a page that lived on
  const twin = model.get("_static");
  const hidden = h("style", {}, twin ? `.${CSS.escape(twin)}{display:none!important}` : "");
  el.append(hidden);
  return () => hidden.remove();
}
