"""The book: `sphinx-build -W docs docs/_build/html`, with the extra `docs`. Nothing runs while it is built."""

import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

from jaxshard_magic.views import html_tags

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

project = "jaxshard_magic"
copyright = "the jaxshard_magic authors"
author = "the jaxshard_magic authors"
release = metadata.version("jaxshard_magic")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "option_tables", "report_frames"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

# Notebooks are shown as they were executed and committed; a page's blocks are run by tests/package/test_book.py.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # options begin with two dashes
myst_url_schemes = ["http", "https", "mailto"]

# Docstrings have `code` in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # fields of dataclasses are documented by autodoc as well

html_theme = "sphinx_book_theme"
html_title = "jaxshard_magic"
html_show_sourcelink = False
html_copy_source = False
html_css_files = ["report.css"]
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}


def style_reports(app: Sphinx) -> None:
    """Reports of notebooks have the colours of their own documents, in both themes and on the page's own ground."""
    ours = "html[data-theme] .bd-content div.cell_output .text_html:has(.jss):not(:has(table.dataframe))"
    style = app.outdir / "_static" / "report.css"
    style.parent.mkdir(parents=True, exist_ok=True)
    style.write_text(
        html_tags.embedded_styles("html[data-theme=dark]") + ours + "{background:none;padding:0}\n",
        encoding="utf-8",
    )


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", style_reports)
