// What the filter finds: every word of it must stand in a leaf's path, type, role or state.

/** `find(query)` gives the set of leaves that match, null for an empty query. */
export function searcher(data, mesh) {
  const failed = new Set(data.failed);
  let texts = null;

  const text = (leaf) => {
    const { path, role, dtype, shape, spec } = data.leaves;
    const dims = shape[leaf].map((size, i) => `${size}${axes(spec[leaf][i] ?? [])}`);
    const states = [leaf in data.short ? "warn" : "", failed.has(leaf) ? "differs" : ""];
    return [path[leaf], `${dtype[leaf]}[${dims.join(",")}]`, role[leaf], ...states].join(" ").toLowerCase();
  };
  const axes = (indices) => indices.map((index) => `@${mesh.names[index]}`).join("");

  return (query) => {
    const words = wordsOf(query);
    if (!words.length) return null;
    texts ??= data.leaves.path.map((_, leaf) => text(leaf));
    return new Set(texts.flatMap((each, leaf) => (words.every((word) => each.includes(word)) ? [leaf] : [])));
  };
}

export const wordsOf = (query) => query.toLowerCase().split(/\s+/).filter(Boolean);

/** `text` in pieces of [piece, whether a word of the query stands there]. */
export function marked(text, words) {
  const lower = text.toLowerCase();
  const hit = new Uint8Array(text.length);
  for (const word of words) {
    for (let at = lower.indexOf(word); at >= 0; at = lower.indexOf(word, at + 1)) hit.fill(1, at, at + word.length);
  }
  const pieces = [];
  for (let i = 0; i < text.length; i += 1) {
    if (i && hit[i] === hit[i - 1]) pieces.at(-1)[0] += text[i];
    else pieces.push([text[i], hit[i] === 1]);
  }
  return pieces;
}
