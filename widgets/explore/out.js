// The line for the cell, the button that writes it there, and the one that compiles it.

import { h, replace } from "../shared/dom.js";
import { copyable } from "../shared/text.js";
import { nextCell } from "./nextcell.js";
import { setsText } from "./words.js";

const WRITTEN = "written into the cell below; nothing has run";
const BY_HAND = "the whole cell is copied: paste it into the next one";
const LATER = "compiling; a kernel that is busy answers later";
const COMPILING = "compiling it needs the notebook";

/** @import { Context } from "../shared/page.js" */
/** @import { Explorer } from "../shared/payload_types.js" */
/** @import { Trial } from "./trial.js" */
/** @import { Worked } from "./worked.js" */

/**
 * `{element, draw(work)}`; `compile()` asks the kernel; what was done is told in `status`.
 *
 * @param {Explorer} data
 * @param {Trial} trial
 * @param {Context} context
 * @param {() => void} compile
 * @param {{ element: HTMLElement, say: (text: string) => void }} status
 */
export function out(data, trial, { model, el }, compile, status) {
  const sets = h("span", { class: "jsm-small jsm-quiet" });
  const code = h("div", { class: "jsm-ex-line" });
  const buttons = h("div", { class: "jsm-ex-buttons" });
  const { say } = status;
  const element = h(
    "div",
    { class: "jsm-ex-out" },
    h("div", { class: "jsm-ex-head" }, h("h3", {}, "The line for your cell"), sets),
    code,
    h("div", { class: "jsm-ex-buttons" }, buttons, status.element),
  );
  const alone = model.get("_alone");
  const insert = data.cell === null ? null : nextCell(model, el);
  /** @type {Worked} */
  let work;
  /** @type {string} */
  let line;
  let waiting = false;

  /** @param {Worked} now */
  function draw(now) {
    work = now;
    const { compiled } = trial;
    const busy = compiled === "asked";
    if (waiting && !busy) say(compiled?.error ? "not compiled, as told below" : "compiled, as told below");
    waiting = busy;
    replace(sets, setsText(data, trial, work));
    if (work.line !== line) {
      line = work.line;
      const copy = copyable(line);
      /** @type {HTMLElement} */ (copy.querySelector("button")).dataset.k = "copy";
      replace(code, copy);
    }
    replace(
      buttons,
      data.cell === null ? null : write(),
      !data.step ? null : alone ? h("span", { class: "jsm-small jsm-quiet" }, COMPILING) : compileButton(),
    );
  }

  const write = () =>
    h(
      "button",
      { type: "button", class: "jsm-button jsm-ex-button", "data-k": "write", onclick: () => written() },
      insert ? "to the next cell" : "copy the whole cell",
    );

  async function written() {
    const cell = /** @type {string} */ (work.cell); // the button is there only with one
    if (insert?.(cell)) return say(WRITTEN);
    try {
      await navigator.clipboard.writeText(cell);
      return say(BY_HAND);
    } catch {
      return say("this page may not copy: copy the line above, and put it over your cell");
    }
  }

  function compileButton() {
    const { compiled, devices, laid } = trial;
    const busy = compiled === "asked";
    const many = laid.count !== null && devices > laid.count;
    const why = many ? `the mesh takes ${devices} devices, and there are ${laid.count}` : null;
    const press = () => {
      if (busy) return;
      if (why) return say(`not compiled: ${why}`);
      say(LATER);
      compile();
    };
    return [
      h(
        "button",
        {
          type: "button",
          class: "jsm-button jsm-ex-button",
          "aria-disabled": busy || why ? "true" : null,
          title: why ?? "Compile the step with this line; nothing runs",
          "data-k": "compile",
          onclick: press,
        },
        busy ? "compiling\u2026" : "compile",
      ),
      why ? h("span", { class: "jsm-small jsm-quiet" }, `not here: ${why}`) : null,
    ];
  }

  return { element, draw };
}
