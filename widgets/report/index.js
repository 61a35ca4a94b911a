// A report in a notebook: the header, and tabs that each show one view. One selection for all of them.

import communication from "../communication/communication.css";
import { view as communicationView } from "../communication/index.js";
import source from "../communication/source.css";
import { foot } from "../header/foot.js";
import header from "../header/header.css";
import { view as headerView } from "../header/index.js";
import detail from "../layout/detail.css";
import { view as layoutView } from "../layout/index.js";
import layout from "../layout/layout.css";
import { view as measuredView } from "../measured/index.js";
import measured from "../measured/measured.css";
import { view as memoryView } from "../memory/index.js";
import memory from "../memory/memory.css";
import { view as pipelineView } from "../pipeline/index.js";
import pipeline from "../pipeline/pipeline.css";
import { paint } from "../shared/axes.js";
import curve from "../shared/curve.css";
import { Mesh } from "../shared/mesh.js";
import { drawn } from "../shared/page.js";
import { saving } from "../shared/saving.js";
import { follow, Selection } from "../shared/selection.js";
import { view as trainingView } from "../training/index.js";
import report from "./report.css";
import { tabs } from "./tabs.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Model } from "../shared/store.js" */
/** @import { Context } from "../shared/page.js" */

export * as timeline from "../pipeline/ticks.js";
export * as axes from "../shared/axes.js";
export * as format from "../shared/format.js";

const STYLES = [report, header, layout, detail, memory, communication, source, pipeline, measured, curve];

/** @type {Record<Sent.TabId, (data: any, mesh: Mesh, selection: Selection) => HTMLElement>} */
const VIEWS = {
  layout: layoutView,
  memory: memoryView,
  communication: communicationView,
  measured: measuredView,
  pipeline: pipelineView,
  training: trainingView,
};

/**
 * Draw the report of `model` in `el`, all of it or the parts named in `only` ("header", "layout", ...); returns
 * what takes it away again.
 *
 * @param {Context} context
 * @param {string[] | null} [only]
 */
export const render = (context, only = null) =>
  drawn(context, "report", STYLES, (root, data, ends) => {
    if (!data.tabs) {
      root.append(
        saving(context.model, () => "pipeline"),
        pipelineView(data),
      ); // a schedule shown by itself
      return;
    }
    const mesh = new Mesh(data.mesh);
    paint(root, mesh.names);
    const selection = new Selection({ tab: data.opens_on });
    ends.push(follow(selection, context.model, mesh, data.leaves.path, data.opens_on));
    draw(root, data, mesh, selection, context.model, only);
  });

/**
 * @param {HTMLElement} root
 * @param {Sent.Report} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 * @param {Model} model
 * @param {string[] | null} only
 */
function draw(root, data, mesh, selection, model, only) {
  const shown = (/** @type {string} */ name) => only === null || only.includes(name);
  if (shown("header")) root.append(headerView(data, mesh, selection));
  const listed = data.tabs.filter((tab) => shown(tab.id));
  const beside = (/** @type {() => string} */ chosen) => saving(model, chosen);
  if (listed.length) root.append(tabs(listed, selection, (id) => VIEWS[id](data, mesh, selection), beside));
  const last = shown("header") && foot(data, selection);
  if (last) root.append(last);
}
