// Experts, positions and turns: rows of a name, a drawing and words, as Python laid them out.

import { hue } from "./axes.js";
import { h, s } from "./dom.js";

/** @import * as Sent from "./payload_types.js" */

/**
 * The figures of `list`, each `[lead, axis, height, rows]`, below each other; a report saved before there were any has
 * no list.
 *
 * @param {Sent.RowFigure[] | undefined} [list]
 */
export const figures = (list = []) =>
  list.map(([lead, axis, height, rows]) =>
    h(
      "div",
      { class: "jsm-drawn" },
      h("p", {}, lead),
      rows.map(([name, areas, text]) => [
        h("b", {}, name),
        s(
          "svg",
          { width: "100%", height, viewBox: "0 0 1000 1000", preserveAspectRatio: "none", "aria-hidden": "true" },
          areas.map(([x, y, width, high, opacity]) =>
            s("rect", { x, y, width, height: high, opacity, fill: hue(axis) }),
          ),
        ),
        h(
          "span",
          {},
          text.split(/(\d+-\d+)/).map((part, i) => (i % 2 ? h("span", {}, part) : part)),
        ),
      ]),
    ),
  );
