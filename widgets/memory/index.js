// What each device holds while the step runs, by role, against its limit.

import { h } from "../shared/dom.js";
import { counted } from "../shared/format.js";
import { stands } from "../shared/lines.js";
import { spans } from "../shared/text.js";
import { Bars } from "./bars.js";
import { buffers } from "./buffers.js";
import { barsOf, EVERY, endOf, isMeasured, unshown } from "./devices.js";
import { Legend } from "./legend.js";
import { Live } from "./live.js";
import { scale } from "./scale.js";
import { Strip } from "./strip.js";
import { Whole } from "./whole.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */
/** @import { Selection } from "../shared/selection.js" */

const DESIGNED = 900; // px that the legend goes by until the width is known

/**
 * @param {Sent.Report & { memory: Sent.Memory }} data
 * @param {Mesh} mesh
 * @param {Selection} selection
 */
export function view({ memory, communication }, mesh, selection) {
  const shown = barsOf(memory, mesh);
  const whole = memory.scale_note === null ? null : new Whole(memory);
  const most = Math.max(whole ? 0 : (memory.limit ?? 0), ...shown.map((bar) => endOf(memory, bar)));
  const columns = isMeasured(memory) ? 2 : 1;
  const many = mesh.count > EVERY && memory.devices.peak.some((peak) => peak !== null);
  const legend = new Legend(memory, mesh);
  const bars = new Bars(memory, mesh, selection, shown);
  const strip = many ? new Strip(memory, mesh, selection) : null;
  const live = memory.live ? new Live(memory.live) : null;
  const left = unshown(memory, shown);
  const element = h(
    "div",
    { class: "jsm-memory" },
    h("p", { class: "jsm-lead" }, spans(memory.lead, mesh)),
    legend.element,
    whole?.element,
    bars.element,
    left ? h("p", { class: "jsm-small jsm-quiet" }, restText(left)) : null,
    strip?.element,
    live?.element,
    memory.buffers?.length ? buffers(memory, lineOpener(communication, selection)) : null,
  );
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(contentRect.width);
    if (!now || now === width) return;
    width = now;
    const plan = scale(width, shown, most, columns);
    for (const part of [legend, whole, bars, strip, live]) part?.draw(plan);
  }).observe(element);
  const mark = () => {
    bars.mark();
    strip?.mark();
  };
  selection.on(({ device, pointed }) => (device || pointed) && mark());
  legend.draw(scale(DESIGNED, shown, most, columns));
  mark();
  return element;
}

/**
 * What opens the line of a buffer in the communication, null for a line that does not stand there.
 *
 * @param {Sent.Communication | null} communication
 * @param {Selection} selection
 */
function lineOpener(communication, selection) {
  return (/** @type {Sent.LineFacts} */ { source, line }) =>
    communication && stands(communication, source, line)
      ? () => selection.select({ tab: "communication", line: { source, line } })
      : null;
}

/**
 * `3,630 more devices hold less`.
 *
 * @param {number} n
 */
const restText = (n) => `${counted(n, "more device holds", "more devices hold")} less`;
