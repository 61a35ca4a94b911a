"""Standalone documents with live widgets, and the widgets of each result on such a page.

Modules, payloads and pictures are embedded, and nothing is fetched. `static/page.js` gives a widget what a notebook
front end would. Without scripts, or if one fails, the static HTML shows. A widget without a title replaces the HTML
without script; those with a title follow below it.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import THEMES, PageWidget
from jaxshard_magic.views import explorer_payload
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.payload import default_trial, packed_comparison
from jaxshard_magic.views.html_tags import document, extend_document
from jaxshard_magic.views.payload import packed_report
from jaxshard_magic.views.pictures import comparison_pictures, pipeline_pictures, report_pictures
from jaxshard_magic.views.timeline.payload import packed_pipeline

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.schedule.compare import ScheduleComparison

STATIC = Path(__file__).parents[1] / "static"
TWIN = "jsm-twin"
MIME = "application/vnd.jaxshard_magic.page+json"  # MIME type of widgets as data in a saved notebook

# The policy forbids all requests; the page makes modules and images from embedded data, as blobs.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src blob: data:;"
    " base-uri 'none'; form-action 'none'"
)
_HEAD = (
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    # An empty icon keeps browsers from requesting /favicon.ico.
    '<link rel="icon" href="data:,">\n'
    # The class hides the static HTML. An error in any script removes the class again.
    '<script>{const root=document.documentElement;root.className="jsm-alive";'
    'onerror=()=>{root.className=""}}</script>\n'
    # Browsers without modules run this script, and show the static HTML.
    '<script nomodule>document.documentElement.className=""</script>\n'
    f"<style>.jsm-alive .{TWIN}{{display:none}}.jsm-views{{max-width:900px;margin:0 auto}}"
    ".jsm-views summary{margin:16px 0 4px;cursor:pointer}.jsm-above .jss{max-width:900px}</style>\n"
)


def with_widgets(html: str, widgets: Sequence[PageWidget]) -> str:
    """Add widgets to a document.

    Args:
        html: Document made by `document`.
        widgets: A widget without a title replaces the body; the others stand below in folded sections.

    Returns:
        The document; unchanged without widgets.
    """
    return _with_views(html, widgets_as_data(widgets)) if widgets else html


def widgets_as_data(lives: Sequence[PageWidget]) -> list[dict[str, Any]]:
    """Return widgets as plain data for a saved notebook, stored under `MIME`; `rebuild_document` reads the data."""
    return [_view(live) for live in lives]


def rebuild_document(title: str, static: str, views: Sequence[Mapping[str, Any]]) -> str:
    """Build a document from a saved output; widgets are drawn by the modules of this version.

    Args:
        title: Title of the document.
        static: HTML without script.
        views: Widgets as returned by `widgets_as_data`.
    """
    return _with_views(document(title, static), views)


def _with_views(html: str, views: Sequence[Mapping[str, Any]]) -> str:
    modules = dict.fromkeys(view["bundle"] for view in views)
    data = {"modules": {name: _deflated(_module(name)) for name in modules}, "views": views}
    twin = any(not view["title"] for view in views)
    # A `</script>` inside of the JSON would end the script element.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def body(static: str) -> str:
        return (
            f'<div class="{TWIN if twin else "jsm-above"}">\n{static}</div>\n'
            '<main class="jsm-views"></main>\n'
            f'<script type="application/json" id="jsm-page">{text}</script>\n'
            f'<script type="module">\n{_module("page")}</script>\n'
        )

    return extend_document(html, _HEAD, body)


def _view(live: PageWidget) -> dict[str, Any]:
    pictures = {theme: {name: draw(theme) for name, draw in live.pictures.items()} for theme in THEMES}
    return {
        "bundle": live.bundle,
        "title": live.title,
        "data": b64encode(live.data).decode(),
        "state": dict(live.state),
        "pictures": _deflated(json.dumps(pictures, ensure_ascii=False)),
    }


def _module(name: str) -> str:
    return (STATIC / f"{name}.js").read_text(encoding="utf-8")


def _deflated(text: str) -> str:
    """Return text as base64 of zlib, the format read by `unpacked` in `widgets/shared/payload.js`."""
    return b64encode(zlib.compress(text.encode(), 9)).decode()


def of_report(report: Report) -> Sequence[PageWidget]:
    """Return the widget of a report."""
    return [PageWidget("report", packed_report(report), pictures=report_pictures(report))]


def of_pipeline(p: Pipeline) -> Sequence[PageWidget]:
    """Return the timeline of a pipeline."""
    return [PageWidget("report", packed_pipeline(p), pictures=pipeline_pictures(p))]


def of_comparison(comparison: Comparison) -> Sequence[PageWidget]:
    """Return the widget of a comparison."""
    return [
        PageWidget("compare", packed_comparison(comparison), _selection(comparison), comparison_pictures(comparison))
    ]


def of_choice(choice: Choice) -> Sequence[PageWidget]:
    """Return the widget of a choice and, below it, that of the report of the choice."""
    comparison = choice.comparison
    chosen = () if choice.report is None else of_report(choice.report)
    return [
        PageWidget("compare", packed_choice(choice), _selection(comparison), comparison_pictures(comparison)),
        *(replace(widget, title="The report of the choice") for widget in chosen),
    ]


def of_schedules(comparison: "ScheduleComparison") -> Sequence[PageWidget]:
    """Return the timeline of each valid schedule."""
    timelines = {row.name: row.schedule.timeline(beside=False) for row in comparison.rows if row.schedule is not None}
    return [replace(widget, title=name) for name, p in timelines.items() for widget in of_pipeline(p)]


def of_explorer(ex: "Explorer") -> Sequence[PageWidget]:
    """Return the widget of an explorer."""
    state = {**explorer_payload.state(ex), "leaf": None, "device": None}
    return [PageWidget("explore", explorer_payload.packed_explorer(ex), state)]


def _selection(comparison: Comparison) -> dict[str, int | None]:
    return {"chosen": default_trial(comparison), "other": None}
