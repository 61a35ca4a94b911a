// Buttons that save a view's picture as a file. Python draws it: the kernel is asked for it, or the page that has it.

import { h } from "./dom.js";

const [ANSWER, SAID_FOR] = [8000, 2000]; // ms that a picture may take, and that a button says what came of it
const PIXELS = 2; // of a PNG for each px
const ENDINGS = ["svg", "png"];

/** @import { Model } from "./store.js" */

/**
 * Buttons for the picture that `name()` gives the name of, of what `model` shows.
 *
 * @param {Model} model
 * @param {() => string} name
 */
export function saving(model, name) {
  const element = h("div", { class: "jsm-save jsm-small jsm-quiet" }, "save picture", ENDINGS.map(button));

  /** @param {string} ending */
  function button(ending) {
    const node = h(
      "button",
      { type: "button", class: "jsm-button", "data-k": ending, "aria-label": label(ending), onclick },
      ending,
    );
    /** @type {number | undefined} */
    let timer;
    async function onclick() {
      clearTimeout(timer);
      node.textContent = await saved(ending).catch(({ message }) => message);
      timer = setTimeout(() => (node.textContent = ending), SAID_FOR);
    }
    return node;
  }

  /** @param {string} ending */
  async function saved(ending) {
    const picture = name();
    const theme = /** @type {HTMLElement} */ (element.closest(".jsm")).dataset.theme;
    const text = await asked(model, picture, theme);
    const svg = new Blob([text], { type: "image/svg+xml" });
    offer(ending === "svg" ? svg : await pixels(svg), `${picture}.${ending}`);
    return "saved";
  }

  return element;
}

const label = (/** @type {string} */ ending) => `Save this picture as ${ending}`;

/**
 * The picture as SVG; rejected where nobody answers, as by a kernel that is busy.
 *
 * @param {Model} model
 * @param {string} name
 * @param {string | undefined} theme
 * @returns {Promise<string>}
 */
function asked(model, name, theme) {
  return new Promise((resolve, reject) => {
    const end = () => {
      clearTimeout(timer);
      model.off("msg:custom", hear);
    };
    const timer = setTimeout(() => {
      end();
      reject(new Error("the kernel does not answer"));
    }, ANSWER);
    /** @param {{ kind: string, name: string, theme: string, text: string } | undefined} message */
    function hear(message) {
      if (message?.kind !== "picture" || message.name !== name || message.theme !== theme) return;
      end();
      resolve(message.text);
    }
    model.on("msg:custom", hear);
    model.send({ kind: "picture", name, theme });
  });
}

/**
 * An SVG as PNG, drawn by the browser.
 *
 * @param {Blob} svg
 * @returns {Promise<Blob>}
 */
async function pixels(svg) {
  const url = URL.createObjectURL(svg);
  try {
    const image = new Image();
    image.src = url;
    await image.decode();
    const canvas = h("canvas", { width: PIXELS * image.width, height: PIXELS * image.height });
    /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d")).drawImage(
      image,
      0,
      0,
      canvas.width,
      canvas.height,
    );
    return await new Promise((resolve, reject) => {
      // A browser gives none for a canvas that is larger than it can encode.
      const take = (/** @type {Blob | null} */ blob) =>
        blob ? resolve(blob) : reject(new Error("it is too large for a PNG"));
      canvas.toBlob(take, "image/png");
    });
  } finally {
    URL.revokeObjectURL(url);
  }
}

/**
 * @param {Blob} blob
 * @param {string} file
 */
function offer(blob, file) {
  const url = URL.createObjectURL(blob);
  h("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), SAID_FOR); // a browser begins to read it after the click
}
