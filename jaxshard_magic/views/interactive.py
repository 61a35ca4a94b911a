"""A document with the widgets themselves: their modules, payloads and pictures are in it, and it asks for nothing else.

What a front end gives a widget in a notebook, `static/page.js` gives it here. Without scripts, or where one fails, the
HTML stands that was there before.
"""

import json
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshard_magic.report.sent import THEMES, PageWidget
from jaxshard_magic.views.page import document, with_more

STATIC = Path(__file__).parents[1] / "static"
TWIN = "jsm-twin"
MIME = (
    "application/vnd.jaxshard_magic.page+json"  # of what a saved notebook keeps for a page that is made of it
)

# A page that may reach nothing: what it has of its own it makes blobs of.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src blob: data:;"
    " base-uri 'none'; form-action 'none'"
)
_HEAD = (
    f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
    '<link rel="icon" href="data:,">\n'
    '<script>{const root=document.documentElement;root.className="jsm-alive";'
    'onerror=()=>{root.className=""}}</script>\n'
    '<script nomodule>document.documentElement.className=""</script>\n'
    f"<style>.jsm-alive .{TWIN}{{display:none}}.jsm-views{{max-width:900px;margin:0 auto}}"
    ".jsm-views summary{margin:16px 0 4px;cursor:pointer}.jsm-above .jss{max-width:900px}</style>\n"
)


def with_widgets(made: str, lives: Sequence[PageWidget]) -> str:
    """The document `made` by `views.page.document`, with the widgets of `lives`: one without a title takes the place of
    its body, the others stand below it, to be opened."""
    return _with_views(made, views_of(lives)) if lives else made


def views_of(lives: Sequence[PageWidget]) -> list[dict[str, Any]]:
    """Widgets as plain data, from which `document_of` makes a document: what a saved notebook keeps as `MIME`."""
    return [_view(live) for live in lives]


def document_of(title: str, static: str, views: Sequence[Mapping[str, Any]]) -> str:
    """The document of a saved output: its HTML without script, and its widgets as `views_of` told them. They are drawn
    by this version's modules."""
    return _with_views(document(title, static), views)


def _with_views(made: str, views: Sequence[Mapping[str, Any]]) -> str:
    modules = dict.fromkeys(view["bundle"] for view in views)
    given = {"modules": {name: _packed(_module(name)) for name in modules}, "views": views}
    twin = any(not view["title"] for view in views)
    text = json.dumps(given, separators=(",", ":")).replace("<", "\\u003c")

    def body(static: str) -> str:
        return (
            f'<div class="{TWIN if twin else "jsm-above"}">\n{static}</div>\n'
            '<main class="jsm-views"></main>\n'
            f'<script type="application/json" id="jsm-page">{text}</script>\n'
            f'<script type="module">\n{_module("page")}</script>\n'
        )

    return with_more(made, _HEAD, body)


def _view(live: PageWidget) -> dict[str, Any]:
    pictures = {theme: {name: draw(theme) for name, draw in live.pictures.items()} for theme in THEMES}
    return {
        "bundle": live.bundle,
        "title": live.title,
        "data": b64encode(live.data).decode(),
        "state": dict(live.state),
        "pictures": _packed(json.dumps(pictures, ensure_ascii=False)),
    }


def _module(name: str) -> str:
    return (STATIC / f"{name}.js").read_text(encoding="utf-8")


def _packed(text: str) -> str:
    """As `unpacked` of `widgets/shared/payload.js` reads it."""
    return b64encode(zlib.compress(text.encode(), 9)).decode()
