// The lanes on a canvas: actions, their ideal, what is held, the axis, and the way of one microbatch.

import { brush, hatch } from "./colours.js";
import { fillColumns, sharesOf } from "./columns.js";
import { KINDS } from "./events.js";
import { roomOf, WRITTEN } from "./plan.js";
import { time } from "./say.js";
import { ticks } from "./ticks.js";

const NARROW = 3; // px of an action, on average, below which its lane is drawn in columns
const [EDGE, SEAM] = [2.5, 1]; // px of an edge; device px between two actions
const TICK = 96; // px between two ticks, about
const [FAINT, IDEAL] = [0.28, 0.75]; // opacity
const [DARK, EDGE_INK] = ["#14171a", 0.6];
const MARK = 10; // px of the marks' type

/** @type {Record<string, number[]>} */
const EDGES = { F: [0, 0], B: [1, 1], I: [1, 0], W: [0, 1] }; // above, below

/** @import { Lane, Place } from "./events.js" */
/** @import { Palette } from "./colours.js" */
/** @import { Events } from "./events.js" */
/** @import { LanesData } from "./lanes.js" */
/** @import { Plan } from "./plan.js" */
/** @import { Span } from "./span.js" */
/** @typedef {(at: number) => number} Scale px of a time */

/**
 * What is drawn alike, collected.
 *
 * @typedef {object} Layer
 * @property {Boxes} boxes
 * @property {Boxes} edges
 * @property {[kind: number, text: string, x: number, y: number][]} numbers
 * @property {[x: number, y: number, width: number, height: number][]} frames
 */
/** @typedef {{ own: Lane, starts: Float64Array, ends: Float64Array, until: number }} Times of a lane's events */

/** Boxes by kind, drawn a kind at a time. */
class Boxes {
  #by = [...KINDS].map(() => /** @type {number[]} */ ([]));

  /**
   * @param {number} kind
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {number} height
   */
  add(kind, x, y, width, height) {
    this.#by[kind].push(x, y, width, height);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {string[]} colours
   */
  fill(context, colours) {
    this.#by.forEach((flat, kind) => {
      if (!flat.length) return;
      context.fillStyle = colours[kind];
      context.beginPath();
      for (let i = 0; i < flat.length; i += 4) context.rect(flat[i], flat[i + 1], flat[i + 2], flat[i + 3]);
      context.fill();
    });
  }
}

/** @returns {Layer} */
const layer = () => ({ boxes: new Boxes(), edges: new Boxes(), numbers: [], frames: [] });

export class Painter {
  #context;
  #events;
  #about;
  #ratio = 1;
  width = 0;
  /** @type {Plan} */
  plan;
  /** @type {CanvasPattern} */
  #hatch;
  /** @type {Palette} */
  #colours;
  /** @type {number | undefined} */
  #most; // activations held at once, on any rank

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Events} events
   * @param {LanesData} about
   */
  constructor(canvas, events, about) {
    this.canvas = canvas;
    this.#events = events;
    this.#about = about;
    this.#context = brush(canvas, { willReadFrequently: true });
  }

  /**
   * Make the canvas as large as `plan` in a box `width` px wide, in `colours`.
   *
   * @param {Plan} plan
   * @param {number} width
   * @param {Palette} colours
   */
  fit(plan, width, colours) {
    const { canvas } = this;
    this.#ratio = globalThis.devicePixelRatio || 1;
    [canvas.width, canvas.height] = [Math.round(width * this.#ratio), Math.round(plan.height * this.#ratio)];
    [canvas.style.width, canvas.style.height] = [`${width}px`, `${plan.height}px`];
    this.plan = plan;
    this.width = width;
    this.#colours = colours;
    this.#hatch = hatch(this.#context, colours.hatch, this.#ratio);
  }

  /**
   * Draw the part of the time in `span`; `mb` is the marked microbatch, `cursor` the place that the keyboard is on.
   *
   * @param {Span} span
   * @param {number | null} mb
   * @param {{ rank: number, event: number } | null} cursor
   */
  draw(span, mb, cursor) {
    const context = this.#context;
    context.setTransform(this.#ratio, 0, 0, this.#ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.plan.height);
    context.font = `500 ${MARK}px ${this.#colours.font}`;
    /** @type {Scale} */
    const x = (at) => ((at - span.from) / span.length) * this.width;
    this.#axis(span, x);
    const [over, under] = [layer(), layer()];
    const ideal = { boxes: new Boxes(), faint: new Boxes() };
    for (let rank = 0; rank < this.plan.ranks; rank += 1) {
      this.#ground(rank, x);
      this.#lane(rank, span, x, mb, over, under);
      if (this.plan.ideal) this.#ideal(rank, span, x, mb, ideal);
      if (this.plan.held) this.#held(rank, span, x);
    }
    this.#fill(under, mb === null ? 1 : FAINT);
    this.#fillIdeal(ideal.faint, FAINT * IDEAL);
    this.#fillIdeal(ideal.boxes, IDEAL);
    this.#fill(over, 1);
    this.#ends(x);
    if (mb !== null) this.#way(mb, x, over.frames);
    if (cursor) this.#cursor(cursor, x);
    if (!span.whole) this.#scrollbar(span);
  }

  /** @param {number} value */
  #snap(value) {
    return Math.round(value * this.#ratio) / this.#ratio;
  }

  /**
   * Actions with their edges and numbers; faint ones lie on a ground of their own, so that no hatch is seen in them.
   *
   * @param {Layer} layer
   * @param {number} alpha
   */
  #fill({ boxes, edges, numbers }, alpha) {
    const context = this.#context;
    const { kinds, on, bg, ink } = this.#colours;
    const ground = kinds.map(() => bg);
    const dark = kinds.map(() => DARK);
    if (alpha < 1) boxes.fill(context, ground);
    context.globalAlpha = alpha;
    boxes.fill(context, kinds);
    context.globalAlpha = EDGE_INK * alpha;
    edges.fill(context, dark);
    context.globalAlpha = alpha < 1 ? 2 * FAINT : 1;
    context.textAlign = "center";
    context.textBaseline = "alphabetic";
    let last = null;
    for (const [kind, text, at, y] of numbers) {
      if (last !== kind) context.fillStyle = alpha < 1 ? ink : on[kind];
      last = kind;
      context.fillText(text, at, y);
    }
    context.globalAlpha = 1;
  }

  /**
   * @param {Boxes} boxes
   * @param {number} alpha
   */
  #fillIdeal(boxes, alpha) {
    boxes.fill(
      this.#context,
      this.#colours.kinds.map(() => this.#colours.bg),
    );
    this.#context.globalAlpha = alpha;
    boxes.fill(this.#context, this.#colours.kinds);
    this.#context.globalAlpha = 1;
  }

  /**
   * @param {Span} span
   * @param {Scale} x
   */
  #axis(span, x) {
    const context = this.#context;
    const { top, bottom } = this.plan;
    context.strokeStyle = this.#colours.line;
    context.fillStyle = this.#colours["ink-2"];
    context.textBaseline = "alphabetic";
    context.lineWidth = 1;
    context.beginPath();
    const most = Math.max(2, this.width / TICK);
    for (const [at, label] of ticks(span.from, span.to, span.end, most, this.#about.unit)) {
      const place = Math.min(this.width - 0.5, Math.round(x(at)) + 0.5);
      context.moveTo(place, top - 4);
      context.lineTo(place, bottom - 4);
      const half = context.measureText(label).width / 2;
      context.textAlign = place < half ? "left" : place + half > this.width ? "right" : "center";
      context.fillText(label, place < half ? 0 : Math.min(place, this.width), 10);
    }
    context.stroke();
  }

  /**
   * A lane with nothing in it, and its ideal's: all of it is bubble.
   *
   * @param {number} rank
   * @param {Scale} x
   */
  #ground(rank, x) {
    const context = this.#context;
    const { plan } = this;
    const [left, right] = [Math.max(0, x(0)), Math.min(this.width, x(this.#about.end))];
    if (right <= left) return;
    const box = (/** @type {number} */ y, /** @type {number} */ to, /** @type {number} */ height) => {
      context.fillStyle = this.#colours.bg;
      context.fillRect(left, y, to - left, height);
      context.fillStyle = this.#hatch;
      context.fillRect(left, y, to - left, height);
    };
    box(plan.y(rank), right, plan.lane);
    context.strokeStyle = this.#colours.line;
    context.strokeRect(left + 0.5, plan.y(rank) + 0.5, right - left - 1, plan.lane - 1);
    const ideal = Math.min(this.width, x(this.#about.ideal_end ?? 0));
    if (plan.ideal && ideal > left) box(plan.idealY(rank), ideal, plan.ideal);
  }

  /**
   * @param {number} rank
   * @param {Span} span
   * @param {Scale} x
   * @param {number | null} mb
   * @param {Layer} over
   * @param {Layer} under
   */
  #lane(rank, span, x, mb, over, under) {
    const { plan, width } = this;
    const [low, high] = this.#events.between(rank, span.from, span.to);
    if (high <= low) return;
    const own = this.#events.lanes[rank];
    const dense = width / (high - low) < NARROW;
    if (dense) {
      const of = { own, starts: own.start, ends: own.end, until: this.#about.end };
      this.#columns(of, span, x, plan.y(rank), plan.lane, mb === null ? 1 : FAINT);
      if (mb === null) return;
    }
    for (let i = low; i < high; i += 1) {
      const [from, to] = [own.first[i], own.first[i + 1]];
      if (dense && !this.#has(own, i, mb)) continue;
      const left = this.#snap(x(own.start[i]));
      const right = this.#snap(x(own.end[i]));
      const seam = right - left > NARROW ? SEAM / this.#ratio : 0;
      const wide = Math.max(1 / this.#ratio, right - left - seam);
      const tall = plan.lane / (to - from);
      for (let part = from; part < to; part += 1) {
        const marked = own.mb[part] === mb;
        const into = marked ? over : under;
        const y = plan.y(rank) + (part - from) * tall;
        this.#action(own, part, left, y, wide, tall, into);
        if (marked) over.frames.push([left, y, wide, tall]);
      }
    }
  }

  /**
   * @param {Times} lane
   * @param {Span} span
   * @param {Scale} x
   * @param {number} y
   * @param {number} height
   * @param {number} alpha
   */
  #columns({ own, starts, ends, until }, span, x, y, height, alpha) {
    const columns = Math.round(Math.min(this.width, x(until)) * this.#ratio);
    if (columns < 1) return;
    const to = span.from + (columns / this.canvas.width) * span.length;
    const shares = sharesOf(own, starts, ends, span.from, to, columns);
    const [top, tall] = [y, height].map((px) => Math.round(px * this.#ratio));
    fillColumns(this.#context, shares, top, tall, this.#colours.bytes, alpha);
  }

  /**
   * @param {Lane} lane
   * @param {number} event
   * @param {number | null} mb
   */
  #has({ first, mb: of }, event, mb) {
    for (let part = first[event]; part < first[event + 1]; part += 1) if (of[part] === mb) return true;
    return false;
  }

  /**
   * @param {Lane} lane
   * @param {number} part
   * @param {number} x
   * @param {number} y
   * @param {number} width
   * @param {number} height
   * @param {Layer} layer
   */
  #action({ kind, mb }, part, x, y, width, height, { boxes, edges, numbers }) {
    const of = kind[part];
    boxes.add(of, x, y, width, height);
    if (height < WRITTEN || this.#about.lines) return; // a line of code has no number to write
    const edge = height > 14 ? EDGE : 1.5;
    const [above, below] = EDGES[KINDS[of]];
    if (above) edges.add(of, x, y, width, edge);
    if (below) edges.add(of, x, y + height - edge, width, edge);
    const text = String(mb[part]);
    if (width >= roomOf(text.length)) numbers.push([of, text, x + width / 2, y + height / 2 + 3.6]);
  }

  /**
   * @param {number} rank
   * @param {Span} span
   * @param {Scale} x
   * @param {number | null} mb
   * @param {{ boxes: Boxes, faint: Boxes }} layers
   */
  #ideal(rank, span, x, mb, { boxes, faint }) {
    const own = this.#events.lanes[rank];
    const { idealStart, idealEnd, first, kind, mb: of, count } = own;
    const [y, height] = [this.plan.idealY(rank), this.plan.ideal];
    if ((this.width * span.end) / span.length / count < NARROW) {
      const lane = { own, starts: idealStart, ends: idealEnd, until: this.#about.ideal_end ?? 0 };
      this.#columns(lane, span, x, y, height, mb === null ? IDEAL : FAINT * IDEAL);
      return;
    }
    for (let i = 0; i < count; i += 1) {
      if (idealEnd[i] < span.from || idealStart[i] > span.to) continue;
      const left = this.#snap(x(idealStart[i]));
      const right = this.#snap(x(idealEnd[i]));
      const seam = right - left > NARROW ? SEAM / this.#ratio : 0;
      const tall = height / (first[i + 1] - first[i]);
      for (let part = first[i]; part < first[i + 1]; part += 1) {
        const into = mb === null || of[part] === mb ? boxes : faint;
        into.add(kind[part], left, y + (part - first[i]) * tall, Math.max(1 / this.#ratio, right - left - seam), tall);
      }
    }
  }

  /**
   * @param {number} rank
   * @param {Span} span
   * @param {Scale} x
   */
  #held(rank, span, x) {
    const context = this.#context;
    const steps = this.#events.held(rank);
    this.#most ??= Math.max(
      1e-9,
      ...this.#events.lanes.flatMap((_, each) => this.#events.held(each).map(([, n]) => n)),
    );
    const most = this.#most;
    const base = this.plan.base(rank);
    const y = (/** @type {number} */ held) => Math.round(base - (held / most) * this.plan.held) + 0.5;
    const right = Math.min(this.width, x(this.#about.end));
    context.beginPath();
    context.moveTo(Math.max(-1, x(0)), y(0));
    let last = 0;
    for (const [at, held] of steps) {
      const place = Math.max(-1, Math.min(this.width + 1, x(at)));
      context.lineTo(place, y(last));
      context.lineTo(place, y(held));
      last = held;
      if (at > span.to) break;
    }
    context.lineTo(right, y(last));
    context.strokeStyle = this.#colours["ink-3"];
    context.lineWidth = 1;
    context.stroke();
    context.lineTo(right, y(0));
    context.lineTo(Math.max(-1, x(0)), y(0));
    context.fillStyle = this.#colours["fill-2"];
    context.fill();
  }

  /**
   * Where the ideal ends, and what is shown.
   *
   * @param {Scale} x
   */
  #ends(x) {
    const context = this.#context;
    const { end, ideal_end: ideal, source, unit } = this.#about;
    const { top, bottom } = this.plan;
    context.textAlign = "right";
    context.fillStyle = this.#colours["ink-2"];
    const last = `${source} end ${time(end, unit)}`;
    const right = x(end);
    const shown = right >= 0 && right <= this.width + 1;
    if (shown) context.fillText(last, Math.min(this.width, right), bottom + 10);
    if (ideal === null || x(ideal) < 0 || x(ideal) > this.width + 1) return;
    const at = Math.round(x(ideal)) + 0.5;
    const label = `ideal end ${time(ideal, unit)}`;
    const room = shown ? right - context.measureText(last).width - 12 : this.width;
    context.fillText(label, Math.max(context.measureText(label).width, Math.min(at, room)), bottom + 10);
    context.strokeStyle = this.#colours["ink-2"];
    context.setLineDash([3, 2]);
    context.beginPath();
    context.moveTo(at, top - 4);
    context.lineTo(at, bottom);
    context.stroke();
    context.setLineDash([]);
  }

  /**
   * The marked microbatch's actions framed, and lines between them from rank to rank.
   *
   * @param {number} mb
   * @param {Scale} x
   * @param {Layer["frames"]} frames
   */
  #way(mb, x, frames) {
    const context = this.#context;
    const { plan } = this;
    context.strokeStyle = this.#colours.ink;
    context.lineWidth = 1.5;
    for (const [left, y, width, height] of frames) context.strokeRect(left, y - 0.25, width, height + 0.5);
    context.lineWidth = 1;
    context.beginPath();
    for (const { from, to } of this.#events.path(mb)) {
      const down = to.rank > from.rank;
      const left = x(this.#events.lanes[from.rank].end[from.event]);
      const right = x(this.#events.lanes[to.rank].start[to.event]);
      if (right < 0 || left > this.width) continue;
      context.moveTo(left, plan.y(from.rank) + (down ? plan.lane : 0));
      context.lineTo(right, plan.y(to.rank) + (down ? 0 : plan.lane));
    }
    context.stroke();
  }

  /**
   * @param {Place} place
   * @param {Scale} x
   */
  #cursor({ rank, event }, x) {
    const context = this.#context;
    const { start, end } = this.#events.lanes[rank];
    const [left, right] = [x(start[event]), x(end[event])];
    context.strokeStyle = this.#colours.focus;
    context.lineWidth = 2;
    context.strokeRect(left - 1, this.plan.y(rank) - 2, Math.max(2, right - left) + 1, this.plan.lane + 4);
  }

  /**
   * Which part of the time is on show.
   *
   * @param {Span} span
   */
  #scrollbar(span) {
    const context = this.#context;
    const y = this.plan.height - 3;
    context.fillStyle = this.#colours["fill-2"];
    context.fillRect(0, y, this.width, 3);
    context.fillStyle = this.#colours["ink-3"];
    context.fillRect((span.from / span.end) * this.width, y, Math.max(8, (span.length / span.end) * this.width), 3);
  }
}
