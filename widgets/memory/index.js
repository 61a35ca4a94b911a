// What each device holds while the step runs, by role, against its limit.

import { h } from "../shared/dom.js";
import { bytes, counted } from "../shared/format.js";
import { spans } from "../shared/text.js";
import { Bars } from "./bars.js";
import { Strip } from "./strip.js";

const EVERY = 16; // devices up to which each has a bar
const MOST = 8; // bars of groups
const SMALL = 1 / 700; // of the scale: less than a pixel
const TOLD = {
  params: "Parameters of the model",
  optimizer: "State of the optimizer",
  batch: "Examples of one step",
  temporaries: "What the compiled program needs while it runs: activations, gradients, buffers of collectives",
  other: "Keys, counters, outputs that take no argument's memory, the program itself",
};

export function view(data, mesh, selection) {
  const { memory } = data;
  const bars = new Bars(data, mesh, selection, listed(memory, mesh));
  const many = mesh.count > EVERY && memory.devices.peak.some((peak) => peak !== null);
  const strip = many ? new Strip(data, mesh, selection) : null;
  const left = mesh.count > EVERY ? memory.groups.slice(MOST).reduce((n, group) => n + group.members.length, 0) : 0;
  const drawn = [bars, strip].filter(Boolean);
  const element = h(
    "div",
    { class: "jsm-memory" },
    h("p", { class: "jsm-lead" }, spans(memory.lead, mesh)),
    legend(memory),
    bars.element,
    left ? h("p", { class: "jsm-small jsm-quiet" }, `${counted(left, "more device holds", "more devices hold")} less`) : null,
    strip?.element,
  );
  let width = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const now = Math.floor(contentRect.width);
    if (!now || now === width) return;
    width = now;
    for (const each of drawn) each.draw(width);
  }).observe(element);
  selection.on(({ device, pointed }) => {
    if ((device || pointed) && width) for (const each of drawn) each.mark();
  });
  return element;
}

/** Every device up to sixteen, above that the groups of those that are alike, fullest first. */
function listed(memory, mesh) {
  if (mesh.count <= EVERY) {
    return mesh.devices.map((id, position) => ({ label: String(id), times: 1, top: position, members: [position] }));
  }
  return memory.groups.slice(0, MOST).map(({ text, members, top }) => ({
    label: text.replace(/^devices?[\s\u00a0]/, ""),
    times: members.length,
    top,
    members,
  }));
}

/** The roles with what the fullest device holds of them. */
function legend(memory) {
  const { top } = memory.groups[0];
  const known = memory.roles.reduce((sum, role) => sum + (memory.devices[role]?.[top] ?? 0), 0);
  const scale = Math.max(1, memory.limit ?? 0, memory.devices.peak[top] ?? known);
  const items = memory.roles.map((role) => {
    const size = memory.devices[role]?.[top] ?? null;
    const note = size !== null && size / scale < SMALL ? h("span", { class: "jsm-quiet" }, size ? " (too small to see)" : " (on others)") : null;
    return h("li", { title: TOLD[role] ?? role }, h("i", { class: `jsm-key jsm-key-${role}` }), role, " ", h("b", {}, bytes(size)), note);
  });
  return h("ul", { class: "jsm-legend" }, items);
}
