// Python in a few colours: keywords, text, comments, numbers. Light, for it must read any line alone.

import { h } from "../shared/dom.js";

/** @import { Child } from "../shared/dom.js" */

/** @typedef {ReturnType<typeof colouring>} Colours */

const KEYWORDS =
  "False None True and as assert async await break class continue def del elif else except finally for from global" +
  " if import in is lambda nonlocal not or pass raise return try while with yield";
const WORD = new Set(KEYWORDS.split(" "));
const TOKEN = new RegExp(
  [
    /(?<com>#.*)/,
    /(?<open>(?:[rbuf]|[rb]{2}|[rf]{2})?(?<quotes>"""|'''))/,
    /(?<str>(?:[rbuf]|[rb]{2}|[rf]{2})?(?:"(?:[^"\\]|\\.)*(?:"|$)|'(?:[^'\\]|\\.)*(?:'|$)))/,
    /(?<word>[\p{L}_][\p{L}\p{N}_]*)/u,
    /(?<num>(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:e[+-]?\d+)?[jx]?[\da-f]*)/,
  ]
    .map(({ source }) => source)
    .join("|"),
  "giu",
);
const MAGIC = /^\s*(%|!)/;

/**
 * `line(text)` gives the lines of one source as nodes, called in their order: what stands between triple quotes goes on
 * over lines, and `quote` is what is open. `jump()` where lines are left out.
 */
export function colouring(/** @type {string | null} */ quote = null) {
  /** @param {string} text */
  function line(text) {
    if (quote === null && MAGIC.test(text)) return [mark("kw", text)];
    /** @type {Child[]} */
    const found = [];
    let at = 0;
    if (quote !== null) at = closed(text, 0, found, quote);
    while (at < text.length) {
      TOKEN.lastIndex = at;
      const token = TOKEN.exec(text);
      if (token === null) break;
      found.push(text.slice(at, token.index));
      at = TOKEN.lastIndex;
      if (token.groups?.open) {
        quote = token.groups.quotes;
        at = closed(text, token.index, found, quote, at);
      } else found.push(coloured(token));
    }
    return [...found, text.slice(at)];
  }

  /**
   * Text from `from` on, up to the `quotes` that end it; returns where it ends.
   *
   * @param {string} text
   * @param {number} from
   * @param {Child[]} found
   * @param {string} quotes
   */
  function closed(text, from, found, quotes, inside = from) {
    const end = text.indexOf(quotes, inside);
    const to = end < 0 ? text.length : end + quotes.length;
    if (end >= 0) quote = null;
    found.push(mark("str", text.slice(from, to)));
    return to;
  }

  return {
    line,
    jump: () => (quote = null),
    get quote() {
      return quote;
    },
  };
}

/** @param {RegExpExecArray} token */
function coloured({ 0: text, groups }) {
  const { com, str, word, num } = groups ?? {};
  if (word && !WORD.has(word)) return text;
  return mark(com ? "com" : str ? "str" : num ? "value" : "kw", text);
}

/**
 * @param {string} kind
 * @param {string} text
 */
const mark = (kind, text) => h("span", { class: `jsm-${kind}` }, text);
