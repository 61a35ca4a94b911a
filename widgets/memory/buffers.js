// The largest buffers that are live at the peak, with the lines that they come from.

import { h, s } from "../shared/dom.js";
import { count, UNKNOWN } from "../shared/format.js";
import { bytesNodes } from "../shared/text.js";

/** @import * as Sent from "../shared/payload_types.js" */

const BAR = [72, 9]; // px

/**
 * @param {string} text
 * @param {string} title
 * @param {string} [cls]
 */
const head = (text, title, cls) => h("th", { scope: "col", title, class: cls ?? null }, text);

/**
 * A heading, and a row for each buffer of `memory.buffers`; `opens(buffer)` is what shows its line, null for none.
 *
 * @param {Sent.Memory} memory
 * @param {(line: Sent.LineFacts) => (() => void) | null} opens
 */
export function buffers(memory, opens) {
  const largest = memory.buffers ?? [];
  const most = Math.max(...largest.map((buffer) => buffer.bytes), 1);
  const top = h(
    "tr",
    {},
    head("size", "Bytes on one device; of all of them where there are several", "jsm-num"),
    h("td", {}),
    head("type, on one device", "Type and shape of what one device holds"),
    head("what", "The operation that made it, and the array it is a form of"),
    head("line", "Line of your code that it comes from", "jsm-num"),
    head("source", "", "jsm-source"),
  );
  const rows = largest.map((buffer) => row(buffer, most, opens(buffer)));
  const named = { class: "jsm-table jsm-buffers", "aria-label": "Largest live buffers at the peak" };
  return h(
    "div",
    { class: "jsm-live-buffers" },
    h("h3", {}, "Largest live buffers at the peak"),
    h("p", { class: "jsm-small jsm-quiet" }, memory.buffers_lead),
    h("table", named, h("thead", {}, top), h("tbody", {}, rows)),
  );
}

/**
 * @param {Sent.MemoryBuffer} buffer
 * @param {number} most
 * @param {(() => void) | null} open
 */
function row(buffer, most, open) {
  const times = buffer.count > 1 ? h("span", { class: "jsm-quieter" }, ` \u00d7${count(buffer.count)}`) : null;
  return h(
    "tr",
    {},
    h("td", { class: "jsm-num" }, bytesNodes(buffer.bytes)),
    h("td", { class: "jsm-buffer-bar" }, bar(buffer.bytes / most)),
    h("td", { class: "jsm-mono", title: buffer.type }, buffer.type, times),
    h(
      "td",
      { class: "jsm-what", title: buffer.told },
      h("b", {}, buffer.what),
      buffer.about ? h("span", { class: "jsm-quieter" }, ` ${buffer.about}`) : null,
    ),
    h("td", { class: "jsm-num jsm-place", title: buffer.place }, lineOf(buffer, open), callsOf(buffer)),
    h("td", { class: "jsm-source", title: buffer.text }, buffer.text === null ? null : h("code", {}, buffer.text)),
  );
}

/**
 * @param {Sent.MemoryBuffer} buffer
 * @param {(() => void) | null} open
 */
const lineOf = ({ short, place }, open) =>
  open === null
    ? (short ?? UNKNOWN)
    : h(
        "button",
        { type: "button", class: "jsm-link", "aria-label": `${place} in Communication`, onclick: open },
        short,
      );

/** @param {Sent.MemoryBuffer} buffer */
const callsOf = ({ calls }) => (calls ? h("span", { class: "jsm-quieter" }, ` ${calls}`) : null);

/** @param {number} part */
const bar = (part) =>
  s(
    "svg",
    { width: BAR[0], height: BAR[1], "aria-hidden": "true" },
    s("rect", { width: Math.max(1, BAR[0] * part), height: BAR[1], fill: "var(--jsm-temporaries)" }),
  );
