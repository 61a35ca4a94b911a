// A training that runs: what its line says, how much is done, and charts that grow. The kernel sends all there is now and
// then, and what is new in between; a page that missed a message waits for the next whole.

import curve from "../shared/curve.css";
import { chart } from "../shared/curve.js";
import { h, replace } from "../shared/dom.js";
import { drawn } from "../shared/page.js";
import { unpacked } from "../shared/payload.js";
import style from "./live.css";

/** @import { Context } from "../shared/page.js" */
/** @import { CurveTail, TrainingUpdate } from "../shared/payload_types.js" */

const [CHARTS, OF_LOOP] = [6, 3]; // that are drawn, and how many of them at most are of the loop
const DRAWN = ["step_s", "tokens_per_s", "examples_per_s", "mfu", "flops_per_s", "memory", "busy"];

/**
 * Draw the training of `model` in `el`; returns what takes it away again.
 *
 * @param {Context} context
 */
export const render = (context) =>
  drawn(context, "training", [style, curve], (root, data, ends) => {
    const { model } = context;
    const training = new Training(data);
    root.append(training.element);
    const hear = (/** @type {{ kind: string, update: TrainingUpdate } | undefined} */ message) =>
      message?.kind === "update" && training.take(message.update);
    const renew = async () => training.take(await unpacked(model.get("_data")), true);
    model.on("msg:custom", hear);
    model.on("change:_data", renew);
    ends.push(() => {
      model.off("msg:custom", hear);
      model.off("change:_data", renew);
      training.end();
    });
  });

class Training {
  /** @type {number | null} */
  frame = null;
  /** @type {Map<string, CurveTail>} */
  curves = new Map();
  /** @type {TrainingUpdate} */
  said;

  /** @param {TrainingUpdate} data */
  constructor(data) {
    this.line = h("p", { class: "jsm-lead" });
    this.bar = h("div", {
      class: "jsm-live-bar",
      role: "progressbar",
      "aria-label": "steps done",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
    });
    this.facts = h("dl", { class: "jsm-live-facts" });
    this.charts = h("div", { class: "jsm-curves" });
    this.element = h("div", { class: "jsm-live" }, this.line, this.bar, this.facts, this.charts);
    this.take(data, true);
  }

  /**
   * Take what is new, or with `whole` all there is.
   *
   * @param {TrainingUpdate} update
   */
  take(update, whole = false) {
    if (!whole && update.number !== this.said.number + 1) return;
    if (whole) this.curves = new Map();
    this.said = update;
    for (const tail of update.curves) {
      const before = this.curves.get(tail.name)?.buckets ?? [];
      this.curves.set(tail.name, { ...tail, start: 0, buckets: [...before.slice(0, tail.start), ...tail.buckets] });
    }
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { line, share } = this.said;
    replace(this.line, h("b", {}, line));
    this.bar.hidden = share === null;
    this.bar.style.setProperty("--done", String(share ?? 0));
    this.bar.setAttribute("aria-valuenow", (100 * (share ?? 0)).toFixed(1));
    const all = [...this.curves.values()];
    const loop = all.filter(({ unit }) => unit !== null);
    replace(
      this.facts,
      loop.map(({ label, value }) => h("div", {}, h("dt", {}, label), h("dd", {}, value))),
    );
    replace(
      this.charts,
      drawnOf(all, loop).map((each) => chart([each], each.unit === null ? each.value : "")),
    );
  }

  end() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
  }
}

/**
 * The curves that have a chart: those of the step first, then those of its loop that tell most.
 *
 * @param {CurveTail[]} all
 * @param {CurveTail[]} loop
 */
function drawnOf(all, loop) {
  const named = new Map(loop.map((curve) => [curve.name, curve]));
  if (named.has("tokens_per_s")) named.delete("examples_per_s");
  const known = DRAWN.flatMap((name) => named.get(name) ?? []).filter(({ buckets }) => buckets.length > 1);
  const shown = known.slice(0, OF_LOOP);
  const own = all.filter(({ unit }) => unit === null);
  return [...own.slice(0, CHARTS - shown.length), ...shown];
}
