// Bundles the browser sources into jaxshard_magic/static. `npm run build`, or `npm run watch` while editing.
import { createHash } from "node:crypto";
import { readdir, readFile } from "node:fs/promises";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));

/** What the bundles are made from, as one hash: tests/widgets/test_bundles.py works out the same. */
async function sourceHash() {
  const names = (await readdir(here, { recursive: true }))
    .map((name) => name.replaceAll("\\", "/"))
    .filter((name) => /\.(js|mjs|css)$/.test(name) && !name.startsWith("node_modules/"))
    .sort();
  const hash = createHash("sha256");
  for (const name of names) {
    const text = (await readFile(join(here, name), "utf8")).replaceAll("\r\n", "\n");
    hash.update(`${name}\0${text}\0`);
  }
  return hash.digest("hex").slice(0, 16);
}

/** Style sheets are imported as minified text; shared/page.js puts them into the page. */
const styles = {
  name: "styles as text",
  setup(build) {
    build.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const source = await readFile(path, "utf8");
      const { code } = await esbuild.transform(source, { loader: "css", minify: true });
      return { contents: code, loader: "text" };
    });
  },
};

const options = {
  absWorkingDir: here,
  entryPoints: [
    { in: "report/index.js", out: "report" },
    { in: "compare/index.js", out: "compare" },
    { in: "explore/index.js", out: "explore" },
    { in: "live/index.js", out: "live" },
    { in: "stop/index.js", out: "stop" },
    { in: "loader/index.js", out: "loader" },
    { in: "page/index.js", out: "page" },
  ],
  outdir: "../jaxshard_magic/static",
  bundle: true,
  format: "esm",
  target: ["es2022"],
  minify: true,
  charset: "utf8",
  legalComments: "none",
  banner: { js: `// Built from widgets/, sources ${await sourceHash()}: do not edit.` },
  plugins: [styles],
  logLevel: "info",
};

if (process.argv.includes("--watch")) {
  await (await esbuild.context(options)).watch();
} else {
  await esbuild.build(options);
}
