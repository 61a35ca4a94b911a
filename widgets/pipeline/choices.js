// What could be chosen instead, from what was simulated: schedules, stages, microbatches and chunks.

import { counted } from "../shared/format.js";

/** @import * as Sent from "../shared/payload_types.js" */

/** @typedef {Pick<Sent.PipelineNow, "schedule" | "stages" | "microbatches" | "chunks">} Setting what can be chosen */

const [NAME, STAGES, MICROBATCHES, CHUNKS] = /** @type {const} */ ([0, 1, 2, 3]);

/**
 * @param {number} a
 * @param {number} b
 */
const ascending = (a, b) => a - b;

/** A row of the payload by name. */
const named = (/** @type {Sent.WhatIf} */ [schedule, stages, microbatches, chunks, ideal, bubble, makespan, peak]) => ({
  schedule,
  stages,
  microbatches,
  chunks,
  ideal,
  bubble,
  makespan,
  peak,
});

export class Choices {
  /** @type {Map<string, ReturnType<typeof named>>} */
  #rows = new Map();
  #refused;
  #all;

  /** @param {Sent.Pipeline} pipeline */
  constructor({ what_if: rows, refused, now }) {
    for (const row of rows) this.#rows.set(keyOf(row), named(row));
    this.#refused = new Map(refused.map((row) => [keyOf(row), row[4]]));
    this.#all = [...rows, ...refused];
    this.now = now;
    const values = (/** @type {1 | 2 | 3} */ at) => [...new Set(this.#all.map((row) => row[at]))];
    const small = [...rows].sort((a, b) => sizeOf(a) - sizeOf(b)); // each size has its schedules in their own order
    this.values = {
      schedule: [...new Set(small.map((row) => row[NAME]))],
      stages: values(STAGES).sort(ascending),
      microbatches: values(MICROBATCHES).sort(ascending),
      chunks: values(CHUNKS).sort(ascending),
    };
  }

  /**
   * What a choice would give, null where it was not simulated.
   *
   * @param {Setting} choice
   */
  row({ schedule, stages, microbatches, chunks }) {
    return this.#rows.get(keyOf([schedule, stages, microbatches, chunks])) ?? null;
  }

  /**
   * The numbers of chunks with which a schedule of these sizes was simulated.
   *
   * @param {Omit<Setting, "chunks">} choice
   */
  chunksOf({ schedule, stages, microbatches }) {
    return this.values.chunks.filter((chunks) => this.row({ schedule, stages, microbatches, chunks }));
  }

  /**
   * `choice` with `changes`, and with chunks that go with them; null where no chunks do.
   *
   * @param {Setting} choice
   * @param {Partial<Setting>} changes
   */
  changed(choice, changes) {
    const next = { ...choice, ...changes };
    if ("chunks" in changes) return this.row(next) ? next : null;
    const chunks = this.chunksOf(next);
    if (!chunks.length) return null;
    if ("schedule" in changes) return { ...next, chunks: usual(chunks) };
    return { ...next, chunks: chunks.includes(choice.chunks) ? choice.chunks : usual(chunks) };
  }

  /**
   * Why `changes` cannot be chosen.
   *
   * @param {Setting} choice
   * @param {Partial<Setting>} changes
   */
  why(choice, changes) {
    const { schedule, stages, microbatches, chunks } = { ...choice, ...changes };
    const said = this.#refused.get(keyOf([schedule, stages, microbatches, chunks]));
    if (said) return said;
    const own = new Set([...this.#rows.values()].filter((row) => row.schedule === schedule).map((row) => row.chunks));
    if (own.size === 1 && !own.has(chunks)) return `${schedule} has ${counted([...own][0], "chunk")} a rank`;
    const other = [...this.#refused].find(([key]) => key.startsWith(keyOf([schedule, stages, microbatches])));
    return other ? other[1] : `${schedule} was not simulated at this size`;
  }

  /** Where to begin: the same schedule with twice the microbatches, or what is nearest to that. */
  get first() {
    const { schedule, stages, microbatches, chunks } = this.now;
    const wanted = [
      { schedule, stages, microbatches: 2 * microbatches, chunks },
      { schedule, stages, microbatches, chunks },
    ];
    return wanted.find((each) => this.row(each)) ?? [...this.#rows.values()][0];
  }

  /**
   * Points of a schedule's predicted bubble against microbatches, at the stages and chunks of `choice`.
   *
   * @param {string} schedule
   * @param {Setting} choice
   * @returns {[microbatches: number, bubble: number][]}
   */
  curve(schedule, choice) {
    return this.values.microbatches.flatMap((microbatches) => {
      const chunks = this.chunksOf({ ...choice, schedule, microbatches });
      if (!chunks.length) return [];
      const own = schedule === choice.schedule && chunks.includes(choice.chunks) ? choice.chunks : usual(chunks);
      const row = this.row({ ...choice, schedule, microbatches, chunks: own });
      return row ? [[microbatches, row.bubble]] : [];
    });
  }
}

/** @param {Sent.WhatIf | Sent.Pipeline["refused"][number]} row */
const sizeOf = (row) => row[STAGES] * row[MICROBATCHES] * row[CHUNKS];

/** @param {(string | number)[]} row */
const keyOf = (row) => row.slice(0, 4).join("|");

/** Of several numbers of chunks the least above one, with which the schedule is what it is for. */
const usual = (/** @type {number[]} */ chunks) => chunks.find((each) => each > 1) ?? chunks[0];
