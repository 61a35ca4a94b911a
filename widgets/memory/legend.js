// The roles with what the fullest device holds of them.

import { h, replace } from "../shared/dom.js";
import { bytes } from "../shared/format.js";
import { isMeasured, rolesOf } from "./devices.js";

/** @import * as Sent from "../shared/payload_types.js" */
/** @import { Scale } from "./scale.js" */
/** @import { Mesh } from "../shared/mesh.js" */

/** @type {Record<string, string>} */
const TOLD = {
  params: "Parameters of the model",
  optimizer: "State of the optimizer",
  batch: "Examples of one step",
  temporaries: "What the compiled program needs while it runs: activations, gradients, buffers of collectives",
  other: "Keys, outputs that take over no argument's memory, other arguments, the program itself",
};

const SAYS =
  "The most that lay in the device's memory while it ran, of all that it held: the notebook's other arrays, too";

const measured = () => h("li", { title: SAYS }, h("i", { class: "jsm-key jsm-key-measured" }), "measured peak");

/** The legend in `legend.element`; `draw(plan)` says what is too small to see there. */
export class Legend {
  #memory;
  #mesh;
  #others; // the most that any other device holds of each role

  /**
   * @param {Sent.Memory} memory
   * @param {Mesh} mesh
   */
  constructor(memory, mesh) {
    this.#memory = memory;
    this.#mesh = mesh;
    const [{ top }] = memory.groups;
    const most = (/** @type {(number | null)[]} */ sizes) =>
      sizes.reduce((/** @type {number} */ found, size, i) => (i === top ? found : Math.max(found, size ?? 0)), 0);
    this.#others = new Map(rolesOf(memory).map((role) => [role, most(memory.devices[role])]));
    this.element = h("ul", { class: "jsm-legend" });
  }

  /** @param {Scale} plan */
  draw({ x }) {
    const { devices, groups } = this.#memory;
    const [{ top }] = groups;
    const small = (/** @type {number} */ size) => x(size) - x(0) < 1;
    const items = rolesOf(this.#memory).map((role) => {
      const size = devices[role][top];
      const note = size === null ? null : this.#note(small(size), small(this.#others.get(role) ?? 0), top);
      return h(
        "li",
        { title: TOLD[role] },
        h("i", { class: `jsm-key jsm-key-${size === null ? "unknown" : role}` }),
        `${role} `,
        h("b", {}, bytes(size)),
        note ? h("span", { class: "jsm-quiet" }, ` (${note})`) : null,
      );
    });
    replace(this.element, items, isMeasured(this.#memory) ? measured() : null);
  }

  /**
   * @param {boolean} here
   * @param {boolean} elsewhere
   * @param {number} top
   */
  #note(here, elsewhere, top) {
    if (here) return elsewhere ? "too small to see" : "more on others";
    return elsewhere && this.#mesh.count > 1 ? `device ${this.#mesh.devices[top]} only` : null;
  }
}
