// The part of a pipeline's time that is on show.

const STEP = 1.5; // of a zoom by key or button

/** From `from` to `to` of the time 0 to `end`; never shorter than `least`. */
export class Span {
  /**
   * @param {number} end
   * @param {number} least
   */
  constructor(end, least) {
    this.end = end || 1;
    this.least = Math.min(least, this.end);
    this.from = 0;
    this.to = this.end;
  }

  get length() {
    return this.to - this.from;
  }

  get whole() {
    return this.length >= this.end * (1 - 1e-9);
  }

  /**
   * Show `length` from `from` on, as near to that as there is time.
   *
   * @param {number} from
   * @param {number} length
   */
  set(from, length) {
    const kept = Math.max(this.least, Math.min(this.end, length));
    this.from = Math.max(0, Math.min(this.end - kept, from));
    this.to = this.from + kept;
  }

  /**
   * Show a `factor`-th of the time, with `at` staying where it is.
   *
   * @param {number} at
   * @param {number} factor
   */
  zoom(at, factor) {
    const length = Math.max(this.least, Math.min(this.end, this.length / factor));
    this.set(at - ((at - this.from) / this.length) * length, length);
  }

  /**
   * @param {number} at
   * @param {number} times
   */
  step(at, times) {
    this.zoom(at, STEP ** times);
  }

  /** @param {number} time */
  pan(time) {
    this.set(this.from + time, this.length);
  }

  reset() {
    this.set(0, this.end);
  }

  /**
   * Move so far that all of `start` to `end` is on show, or as much as there is room for.
   *
   * @param {number} start
   * @param {number} end
   */
  reach(start, end) {
    const room = 0.05 * this.length;
    if (start < this.from) this.set(start - room, this.length);
    else if (end > this.to) this.set(Math.min(start, end + room - this.length), this.length);
  }
}
