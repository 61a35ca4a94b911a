"""The reports of notebooks as the widgets that they are: each in a frame, drawn from what the saved notebook keeps.

A notebook that ran with `JAXSHARD_VIEW=page` has it beside each report's HTML (`notebooks/execute.py` sees to that).
Nothing of the notebook runs; a reader without scripts sees the HTML, which every frame has, too.
"""

import shutil
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from sphinx.application import Sphinx
from sphinx.config import Config

from jaxshard_magic.views import widget_page

HERE = Path(__file__).parent
FRAMES = "reports"  # the folder of the documents, in `_static`
FIRST_HEIGHT = 640  # px, until a frame has told its own
STYLE = """.jsm-frame{display:block;width:100%;border:0}
html[data-theme] .bd-content div.cell_output .text_html:has(.jsm-frame):not(:has(table.dataframe))
{background:none;padding:0}
"""
SCRIPT = """const root = document.documentElement;
const tell = (frame) => frame.postMessage({ kind: "jaxshard theme", theme: root.dataset.theme }, "*");
const frames = () => document.querySelectorAll(".jsm-frame");
addEventListener("message", ({ data, source }) => {
  if (data?.kind !== "jaxshard height") return;
  const frame = [...frames()].find((each) => each.contentWindow === source);
  if (!frame) return;
  frame.style.height = `${Math.ceil(data.height)}px`;
  tell(source);
});
const told = new MutationObserver(() => frames().forEach((frame) => tell(frame.contentWindow)));
told.observe(root, { attributes: true, attributeFilter: ["data-theme"] });
"""

_documents: dict[str, str] = {}  # by file name, of the build that runs


def bring_notebooks(app: Sphinx, config: Config) -> None:
    """Lay the repository's notebooks where Sphinx reads, in a folder of its own that git ignores, with frames."""
    there = HERE / "notebooks"
    shutil.rmtree(there, ignore_errors=True)
    there.mkdir()
    for path in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
        for output in outputs:
            if widget_page.MIME in output.get("data", {}):
                frame(output.data, f"{path.stem}-{len(_documents)}.html")
        nbformat.write(notebook, there / path.name)


def frame(data: dict[str, Any], name: str) -> None:
    """Put a frame in the place of an output's HTML; its document is written as `name`."""
    kept, static = data.pop(widget_page.MIME), data["text/html"]
    _documents[name] = widget_page.rebuild_document("report", static, kept["views"])
    data["text/html"] = (
        f'<iframe class="jsm-frame" title="report" loading="lazy" height="{FIRST_HEIGHT}"'
        f' src="../_static/{FRAMES}/{escape(name)}"></iframe>'
    )


def write_documents(app: Sphinx) -> None:
    """Write what the frames show, and what sizes them, beside the built pages."""
    static = app.outdir / "_static"
    (static / FRAMES).mkdir(parents=True, exist_ok=True)
    for name, text in _documents.items():
        (static / FRAMES / name).write_text(text, encoding="utf-8")
    (static / "frames.css").write_text(STYLE, encoding="utf-8")
    (static / "frames.js").write_text(SCRIPT, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("config-inited", bring_notebooks)
    app.connect("builder-inited", write_documents)
    app.add_css_file("frames.css")
    app.add_js_file("frames.js")
    return {"parallel_read_safe": True}
