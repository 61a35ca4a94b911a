// A button that interrupts the kernel, by way of its own page: a kernel that is busy reads no messages.

const STOP = "Stop, and keep what is done";
const BY_HAND = "Interrupt the kernel to stop: what is done is kept.";

/** @param {{ model: any, el: HTMLElement }} context */
function render({ model, el }) {
  // JupyterLab and Notebook give the page's own connection to the kernel; others say how to stop.
  const kernel = model.widget_manager?.kernel;
  if (typeof kernel?.interrupt !== "function") {
    el.textContent = BY_HAND;
    return;
  }
  const button = document.createElement("button");
  button.type = "button";
  button.className = "jp-mod-styled jp-mod-minimal";
  button.textContent = STOP;
  button.style.cssText =
    "font: var(--jp-ui-font-size1, 13px) var(--jp-ui-font-family, system-ui, sans-serif); padding: 2px 10px; " +
    "color: inherit; background: none; border: 1px solid currentColor; border-radius: 3px; cursor: pointer; height: auto";
  button.addEventListener("click", async () => {
    button.disabled = true;
    button.textContent = "Stopping, once what has begun is done";
    try {
      await kernel.interrupt();
    } catch (refused) {
      el.textContent = `${BY_HAND} (${/** @type {Error} */ (refused).message})`;
    }
  });
  el.append(button);
}

export default { render };
