// What is known of each device, and which of them share a bar.

import { bytes, count, counted } from "../shared/format.js";

export const EVERY = 16; // devices up to which each has a bar
const MOST = 8; // bars of groups
const LETTERS = 20; // that a bar's label may have

/**
 * A bar: `top` is the device it shows, the fullest of `members`; all are positions in the mesh.
 *
 * @typedef {{label: string, name: string, top: number, members: number[]}} Bar
 */

/** A bar for each device up to sixteen, above that for each group of devices that are alike, fullest first. */
export function barsOf(memory, mesh) {
  if (mesh.count <= EVERY) {
    return mesh.devices.map((id, at) => ({ label: String(id), name: `device ${id}`, top: at, members: [at] }));
  }
  return memory.groups.slice(0, MOST).map(({ text, members, top }) => {
    const ids = text.replace(/^devices?\s/, "");
    const label = ids.length > LETTERS ? counted(members.length, "device") : ids;
    return { label, name: members.length > 1 ? groupName(text, members) : text, top, members };
  });
}

/** `devices 64 to 511, 448 alike`. */
const groupName = (text, { length }) =>
  text.endsWith(" devices") ? `${text} alike` : `${text}, ${count(length)} alike`;

/** How many of the devices that are known no bar shows. */
export function unshown({ groups }, bars) {
  const devices = (listed) => listed.reduce((sum, { members }) => sum + members.length, 0);
  return Math.max(0, devices(groups) - devices(bars));
}

/** The roles to tell of: those that hold anything, and the temporaries where they are not known. */
export function rolesOf({ roles, devices }) {
  if (roles.includes("temporaries") || !devices.temporaries.includes(null)) return roles;
  return [...roles.filter((role) => role !== "other"), "temporaries", ...roles.filter((role) => role === "other")];
}

/** Bytes of all roles that are known on the device at `position`. */
export const sumOf = ({ roles, devices }, position) =>
  roles.reduce((sum, role) => sum + (devices[role][position] ?? 0), 0);

/** How far the bar of the device at `position` goes. */
export const reachOf = (memory, position) => Math.max(memory.devices.peak[position] ?? 0, sumOf(memory, position));

/** Which of the bars is the fullest, the first of those that are alike. */
export function fullestOf({ devices }, bars) {
  const peak = ({ top }) => devices.peak[top] ?? -1;
  return bars.reduce((best, bar, i) => (peak(bar) > peak(bars[best]) ? i : best), 0);
}

/** The bars whose peak reads as the fullest's, where there are others that read less. */
export function standingOut({ devices }, bars) {
  const said = bars.map(({ top }) => bytes(devices.peak[top]));
  const most = said[fullestOf({ devices }, bars)];
  const found = bars.map((_, i) => i).filter((i) => said[i] === most);
  return new Set(found.length < bars.length ? found : []);
}

/** How far the device at `position` is above the limit; 0 or less where it fits, null where that is not known. */
export function excessOf({ limit, devices }, position) {
  const peak = devices.peak[position];
  return limit === null || peak === null ? null : peak - limit;
}

/** The bar in words, for those who do not see it. */
export function spoken(memory, { name, top }) {
  const said = (size) => (size === null ? "not known" : bytes(size));
  const of = memory.limit === null ? "" : ` of ${memory.limit_text}`;
  const roles = rolesOf(memory).map((role) => `${role} ${said(memory.devices[role][top])}`);
  const peak = memory.devices.peak[top];
  const held = peak === null ? "peak not known" : `${bytes(peak)}${of}`;
  return `${name}: ${[held, roles.join(", ")].filter(Boolean).join("; ")}`;
}
