// Light or dark, as the host page is: by what the host says, else by how light its background is.

const MARKED = "[data-jp-theme-light], .vscode-dark, .vscode-light, .vscode-high-contrast, [theme]";

/**
 * Set `data-theme` on `root`, now and whenever the host changes; returns what ends that.
 *
 * @param {HTMLElement} root
 */
export function followTheme(root) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const update = () => root.setAttribute("data-theme", isDark(root, system) ? "dark" : "light");
  const watched = new MutationObserver(update);
  for (const node of [document.documentElement, document.body]) {
    watched.observe(node, { attributes: true, attributeFilter: ["class", "theme", "style", "data-jp-theme-light"] });
  }
  system.addEventListener("change", update);
  update();
  return () => {
    watched.disconnect();
    system.removeEventListener("change", update);
  };
}

/**
 * @param {HTMLElement} root
 * @param {MediaQueryList} system
 */
function isDark(root, system) {
  const host = /** @type {HTMLElement | null} */ (root.parentElement?.closest(MARKED) ?? null);
  if (host?.hasAttribute("data-jp-theme-light")) return host.dataset.jpThemeLight === "false";
  if (host?.matches(".vscode-high-contrast")) return !host.matches(".vscode-high-contrast-light");
  if (host?.matches(".vscode-dark, .vscode-light")) return host.matches(".vscode-dark");
  if (host?.hasAttribute("theme")) return host.getAttribute("theme") === "dark";
  return backgroundIsDark(root.parentElement) ?? system.matches;
}

/**
 * Whether the first background that isn't transparent, from `node` up, is dark; null where there is none.
 *
 * @param {Element | null} node
 */
function backgroundIsDark(node) {
  for (let at = node; at; at = at.parentElement) {
    const [r, g, b, alpha = 1] =
      getComputedStyle(at)
        .backgroundColor.match(/[\d.]+/g)
        ?.map(Number) ?? [];
    if (r !== undefined && alpha > 0.5) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  }
  return null;
}
