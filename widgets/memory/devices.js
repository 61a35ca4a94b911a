// What is known of each device, and which of them share a bar.

import { bytes, count, counted, share } from "../shared/format.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Mesh } from "../shared/mesh.js" */

export const EVERY = 16; // devices up to which each has a bar
const MOST = 8; // bars of groups
const LETTERS = 20; // that a bar's label may have

/**
 * A bar: `top` is the device it shows, the fullest of `members`; all are positions in the mesh. `stage` is where these
 * lie in a pipeline, `pipe=2`, empty where they are of all its stages.
 *
 * @typedef {{label: string, name: string, stage: string, top: number, members: number[]}} Bar
 */

/**
 * A bar for each device up to sixteen, above that for each group of devices that are alike, fullest first.
 *
 * @param {Sent.Memory} memory
 * @param {Mesh} mesh
 */
export function barsOf(memory, mesh) {
  if (mesh.count <= EVERY) {
    return mesh.devices.map((id, at) => {
      const stage = memory.stages?.[at] ?? "";
      return { label: String(id), name: withStage(`device ${id}`, stage), stage, top: at, members: [at] };
    });
  }
  return memory.groups.slice(0, MOST).map(({ text, stage, members, top }) => {
    const ids = text.replace(/^devices?\s/, "");
    const label = ids.length > LETTERS ? counted(members.length, "device") : ids;
    const name = members.length > 1 ? groupName(text, members) : text;
    return { label, name: withStage(name, stage), stage, top, members };
  });
}

/**
 * @param {string} name
 * @param {string} stage
 */
const withStage = (name, stage) => (stage ? `${name}, ${stage}` : name);

/**
 * `devices 64 to 511, 448 alike`.
 *
 * @param {string} text
 * @param {Sent.Position[]} members
 */
const groupName = (text, { length }) =>
  text.endsWith(" devices") ? `${text} alike` : `${text}, ${count(length)} alike`;

/**
 * How many of the devices that are known no bar shows.
 *
 * @param {Sent.Memory} memory
 * @param {Bar[]} bars
 */
export function unshown({ groups }, bars) {
  const devices = (/** @type {Pick<Bar, "members">[]} */ listed) =>
    listed.reduce((sum, { members }) => sum + members.length, 0);
  return Math.max(0, devices(groups) - devices(bars));
}

/**
 * The roles to tell of: those that hold anything, and the temporaries where they are not known.
 *
 * @param {Sent.Memory} memory
 * @returns {Sent.MemoryRole[]}
 */
export function rolesOf({ roles, devices }) {
  if (roles.includes("temporaries") || !devices.temporaries.includes(null)) return roles;
  return [...roles.filter((role) => role !== "other"), "temporaries", ...roles.filter((role) => role === "other")];
}

/**
 * Bytes of all roles that are known on the device at `position`.
 *
 * @param {Sent.Memory} memory
 * @param {Sent.Position} position
 */
const sumOf = ({ roles, devices }, position) => roles.reduce((sum, role) => sum + (devices[role][position] ?? 0), 0);

/**
 * How far the bar of the device at `position` goes.
 *
 * @param {Sent.Memory} memory
 * @param {Sent.Position} position
 */
export const reachOf = (memory, position) => Math.max(memory.devices.peak[position] ?? 0, sumOf(memory, position));

/**
 * How far the bar goes with the tick of its measured peak.
 *
 * @param {Sent.Memory} memory
 * @param {Bar} bar
 */
export const endOf = (memory, bar) => Math.max(reachOf(memory, bar.top), measuredOf(memory, bar)?.size ?? 0);

/**
 * Whether any device's peak was measured.
 *
 * @param {Sent.Memory} memory
 */
export const isMeasured = ({ devices }) => devices.measured.some((size) => size !== null);

/**
 * The measured peak of the bar's devices, the largest: its `size`, and in `off` by how much of the computed one it lies
 * above that, null where that is not known; null where none was measured.
 *
 * @param {Sent.Memory} memory
 * @param {Bar} bar
 */
export function measuredOf({ devices: { measured, peak } }, { members }) {
  const known = members.flatMap((position) => {
    const [size, computed] = [measured[position], peak[position]];
    return size === null ? [] : [{ size, off: computed ? size / computed - 1 : null }];
  });
  return known.length ? known.reduce((a, b) => (b.size > a.size ? b : a)) : null;
}

/**
 * `1.2% more`: a measured peak beside the computed one.
 *
 * @param {number} off
 */
export const offText = (off) => `${share(Math.abs(off))} ${off >= 0 ? "more" : "less"}`;

/**
 * Which of the bars is the fullest, the first of those that are alike.
 *
 * @param {Pick<Sent.Memory, "devices">} memory
 * @param {Bar[]} bars
 */
export function fullestOf({ devices }, bars) {
  const peak = (/** @type {Bar} */ { top }) => devices.peak[top] ?? -1;
  return bars.reduce((best, bar, i) => (peak(bar) > peak(bars[best]) ? i : best), 0);
}

/**
 * The bars whose peak reads as the fullest's, where there are others that read less.
 *
 * @param {Sent.Memory} memory
 * @param {Bar[]} bars
 */
export function standingOut({ devices }, bars) {
  const said = bars.map(({ top }) => bytes(devices.peak[top]));
  const most = said[fullestOf({ devices }, bars)];
  const found = bars.map((_, i) => i).filter((i) => said[i] === most);
  return new Set(found.length < bars.length ? found : []);
}

/**
 * How far the device at `position` is above the limit; 0 or less where it fits, null where that is not known.
 *
 * @param {Sent.Memory} memory
 * @param {Sent.Position} position
 */
export function excessOf({ limit, devices }, position) {
  const peak = devices.peak[position];
  return limit === null || peak === null ? null : peak - limit;
}

/**
 * The bar in words, for those who do not see it.
 *
 * @param {Sent.Memory} memory
 * @param {Bar} bar
 */
export function spoken(memory, bar) {
  const { name, top } = bar;
  const said = (/** @type {number | null} */ size) => (size === null ? "not known" : bytes(size));
  const of = memory.limit === null ? "" : ` of ${memory.limit_text}`;
  const roles = rolesOf(memory).map((role) => `${role} ${said(memory.devices[role][top])}`);
  const peak = memory.devices.peak[top];
  const held = peak === null ? "peak not known" : `${bytes(peak)}${of}`;
  return `${name}: ${[held, measuredText(memory, bar), roles.join(", ")].filter(Boolean).join("; ")}`;
}

/**
 * `measured 5.15 GiB, 1.2% more than computed`, null where no peak was measured.
 *
 * @param {Sent.Memory} memory
 * @param {Bar} bar
 */
function measuredText(memory, bar) {
  const found = measuredOf(memory, bar);
  if (found === null) return null;
  const off = found.off === null ? "" : `, ${offText(found.off)} than computed`;
  return `measured ${bytes(found.size)}${off}`;
}
