// A pipeline's actions as columns: rank by rank in their order, with the times of the same actions in the ideal.

/** @import { LanesData } from "./lanes.js" */

export const KINDS = "FBIWRUOMX"; // a pipeline's, then what else the time of a recorded step goes to
const BACK = 1; // of the three results of a stage's microbatch: forward, backward (or its input gradient), weights

/** @type {Record<string, number>} */
const RESULT = { F: 0, B: BACK, I: BACK, W: 2 };

/** @import * as Sent from "../shared/payload_types.js" */
/** @typedef {{ rank: number, event: number }} Place of an event: its rank, and its index there */

/**
 * A rank's lane. `start`, `end`, `idealStart`, `idealEnd` are by event, the ideal ones empty where there are none; the
 * parts of event `i`, one unless it is fused, are `first[i]` to `first[i + 1]` in `kind` (an index of KINDS), `stage`
 * and `mb`.
 *
 * @typedef {ReturnType<typeof lane>} Lane
 */

/**
 * @param {Sent.LaneEvents} events
 * @param {Sent.LaneTimes | undefined} ideal
 * @param {number} tick
 */
function lane({ kinds, stage, mb, sizes, wait, take }, ideal, tick) {
  const count = wait.length;
  const first = new Int32Array(count + 1);
  for (let i = 0; i < count; i += 1) first[i + 1] = first[i] + (sizes ? sizes[i] : 1);
  const own = times({ wait, take }, tick);
  const best = times(ideal ?? { wait: [], take: [] }, tick);
  return {
    count,
    start: own.starts,
    end: own.ends,
    idealStart: best.starts,
    idealEnd: best.ends,
    first,
    kind: Uint8Array.from(kinds, (letter) => KINDS.indexOf(letter)),
    stage: typeof stage === "number" ? new Int32Array(mb.length).fill(stage) : Int32Array.from(stage),
    mb: Int32Array.from(mb),
  };
}

/**
 * @param {Sent.LaneTimes} events
 * @param {number} tick
 */
function times({ wait, take }, tick) {
  const [starts, ends] = [new Float64Array(wait.length), new Float64Array(wait.length)];
  let at = 0;
  for (let i = 0; i < wait.length; i += 1) {
    at += wait[i];
    starts[i] = at * tick;
    at += take[i];
    ends[i] = at * tick;
  }
  return { starts, ends };
}

/** All actions, and which of them waits for which. */
export class Events {
  /** @type {Map<number, Place>} */
  #found; // rank, event and part by result, stage and microbatch
  #stages;
  #ofLoss; // stages of each loss: nothing goes from one loss to the next
  #microbatches;

  /** @param {LanesData} data */
  constructor({ events, ideal, tick, kept, losses, end }) {
    this.lanes = events.map((each, rank) => lane(each, ideal?.[rank], tick));
    this.hasIdeal = ideal !== null;
    this.end = this.lanes.reduce((most, { end: ends, count }) => Math.max(most, ends[count - 1] ?? 0), end);
    this.kept = kept;
    this.count = this.lanes.reduce((sum, { count }) => sum + count, 0);
    const most = (/** @type {"stage" | "mb"} */ name) =>
      this.lanes.reduce((max, each) => each[name].reduce((a, b) => Math.max(a, b), max), 0) + 1;
    this.#stages = most("stage");
    this.#microbatches = most("mb");
    this.#ofLoss = this.#stages / losses;
    this.#found = new Map();
    this.lanes.forEach((each, rank) => {
      for (let event = 0; event < each.count; event += 1) {
        for (let part = each.first[event]; part < each.first[event + 1]; part += 1) {
          const key = this.#key(RESULT[KINDS[each.kind[part]]], each.stage[part], each.mb[part]);
          this.#found.set(key, { rank, event });
        }
      }
    });
  }

  /**
   * @param {number} result
   * @param {number} stage
   * @param {number} mb
   */
  #key(result, stage, mb) {
    return (result * this.#stages + stage) * this.#microbatches + mb;
  }

  /**
   * @param {number} result
   * @param {number} stage
   * @param {number} mb
   */
  #at(result, stage, mb) {
    if (stage < 0 || stage >= this.#stages) return null;
    return this.#found.get(this.#key(result, stage, mb)) ?? null;
  }

  /**
   * The stage `by` further on, -1 where that is another loss.
   *
   * @param {number} stage
   * @param {number} by
   */
  #beside(stage, by) {
    const loss = Math.floor(stage / this.#ofLoss);
    return Math.floor((stage + by) / this.#ofLoss) === loss ? stage + by : -1;
  }

  get microbatches() {
    return this.#microbatches;
  }

  /**
   * The event of `rank` that runs at `time`, -1 for none.
   *
   * @param {number} rank
   * @param {number} time
   */
  under(rank, time) {
    const at = this.upTo(rank, time) - 1;
    return at >= 0 && time < this.lanes[rank].end[at] ? at : -1;
  }

  /**
   * How many events of `rank` have begun at `time`.
   *
   * @param {number} rank
   * @param {number} time
   */
  upTo(rank, time) {
    const { start, count } = this.lanes[rank];
    let [low, high] = [0, count];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /**
   * The events of `rank` between two times, from the first to behind the last.
   *
   * @param {number} rank
   * @param {number} from
   * @param {number} to
   */
  between(rank, from, to) {
    return [Math.max(0, this.upTo(rank, from) - 1), this.upTo(rank, to)];
  }

  /**
   * The event of `rank` that is nearest to `time`.
   *
   * @param {number} rank
   * @param {number} time
   */
  nearest(rank, time) {
    const { start, end, count } = this.lanes[rank];
    const at = Math.max(0, this.upTo(rank, time) - 1);
    return at + 1 < count && start[at + 1] - time < time - end[at] ? at + 1 : at;
  }

  /**
   * `2F0`, `2F4+3B1`.
   *
   * @param {number} rank
   * @param {number} event
   */
  text(rank, event) {
    const { first, kind, stage, mb } = this.lanes[rank];
    const parts = [];
    for (let i = first[event]; i < first[event + 1]; i += 1) parts.push(`${stage[i]}${KINDS[kind[i]]}${mb[i]}`);
    return parts.join("+");
  }

  /**
   * What an event waits for of another rank: the last of it to end, null for nothing.
   *
   * @param {number} rank
   * @param {number} event
   */
  needs(rank, event) {
    const { first, kind, stage, mb } = this.lanes[rank];
    /** @type {Place | null} */
    let last = null;
    for (let i = first[event]; i < first[event + 1]; i += 1) {
      const letter = KINDS[kind[i]];
      if (letter === "W") continue;
      const need =
        letter === "F"
          ? this.#at(0, this.#beside(stage[i], -1), mb[i])
          : this.#at(BACK, this.#beside(stage[i], 1), mb[i]);
      if (need && need.rank !== rank && (!last || this.#ended(need) > this.#ended(last))) last = need;
    }
    return last;
  }

  /** @param {Place} place */
  #ended({ rank, event }) {
    return this.lanes[rank].end[event];
  }

  /**
   * Where a microbatch goes from rank to rank: `{from, to}`, the places of an event and of the one that waits for it.
   *
   * @param {number} mb
   */
  path(mb) {
    const steps = [];
    for (let stage = 0; stage + 1 < this.#stages; stage += 1) {
      const next = this.#beside(stage, 1);
      for (const [result, here, there] of [
        [0, stage, next],
        [BACK, next, stage],
      ]) {
        const [from, to] = [this.#at(result, here, mb), this.#at(result, there, mb)];
        if (from && to && from.rank !== to.rank) steps.push({ from, to });
      }
    }
    return steps;
  }

  /** @type {Map<number, [time: number, held: number][]>} */
  #steps = new Map();

  /**
   * Times, and the activations that `rank` holds from each on.
   *
   * @param {number} rank
   */
  held(rank) {
    const steps = this.#steps.get(rank) ?? heldBy(this.lanes[rank], this.kept);
    this.#steps.set(rank, steps);
    return steps;
  }
}

/**
 * One from the start of a forward action on, until the backward one ends, or in two parts with its halves.
 *
 * @param {Lane} lane
 * @param {number[]} kept
 */
function heldBy({ count, start, end, first, kind, stage }, kept) {
  const changes = [];
  for (let event = 0; event < count; event += 1) {
    for (let i = first[event]; i < first[event + 1]; i += 1) {
      const share = kept[stage[i]] ?? 1;
      const letter = KINDS[kind[i]];
      if (letter === "F") changes.push([start[event], 1]);
      else changes.push([end[event], -({ B: 1, I: 1 - share, W: share }[letter] ?? NaN)]);
    }
  }
  changes.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  let now = 0;
  /** @type {[time: number, held: number][]} */
  const steps = [[0, 0]];
  for (const [at, change] of changes) {
    now += change;
    const last = steps[steps.length - 1];
    if (at === last[0]) last[1] = now;
    else steps.push([at, now]);
  }
  return steps;
}
