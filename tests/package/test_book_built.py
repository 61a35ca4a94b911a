"""The book, built: without a warning, every link and anchor of it there, every public name in it."""

import re
import subprocess
import sys
from functools import cached_property
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import pytest
from support.browsing import expect, refused
from support.lab_server import until
from support.pages import DOCS

import jaxshard_magic
from jaxshard_magic.views.widget_page import MIME

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.ci


class Page(HTMLParser):
    """What a built page refers to, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.refers: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value is not None:
                self.refers.append(value)
            elif key in ("id", "name") and value:
                self.ids.add(value)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    """The pages of the book, by their files."""
    if find_spec("sphinx") is None:
        refused("no Sphinx: pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in out.rglob("*.html") if "_static" not in path.parts}


def test_every_link_and_anchor_leads_somewhere(book: dict[Path, Page]):
    wrong = []
    for path, page in book.items():
        for link in page.refers:
            to = urlparse(link)
            if to.scheme in ("https", "http", "mailto", "data") or not (to.path or to.fragment):
                continue
            there = (path.parent / unquote(to.path)).resolve() if to.path else path
            known = book.get(there)
            if not there.exists() or (known is not None and to.fragment and unquote(to.fragment) not in known.ids):
                wrong.append(f"{path.name}: {link}")
    assert len(book) > 20 and wrong == []


def test_no_page_fetches_anything_from_elsewhere(book: dict[Path, Page]):
    loads = re.compile(r"""<(?:script|img|link|iframe)[^>]+(?:src|href)=["'](?:https?:)?//""")
    assert [path.name for path in book if loads.search(path.read_text(encoding="utf-8"))] == []


def notebooks(book: dict[Path, Page]) -> list[Path]:
    return sorted(path for path in book if path.parent.name == "notebooks")


def test_the_notebooks_are_shown_with_their_reports(book: dict[Path, Page]):
    shown = notebooks(book)
    committed = sorted((DOCS.parent / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in shown] == [path.stem for path in committed]
    for page, notebook in zip(shown, committed, strict=True):
        frames = [link for link in book[page].refers if "_static/reports/" in link]
        assert len(frames) == notebook.read_text(encoding="utf-8").count(f'"{MIME}"') > 0
    style = shown[0].parents[1] / "_static/report.css"
    assert ".jss-error{color:" in style.read_text(encoding="utf-8"), "the colours of what has no widget"


def test_a_report_in_the_book_is_a_widget_of_its_height_and_the_books_theme(book: dict[Path, Page], browser: "Browser"):
    page = browser.new_page(viewport={"width": 1300, "height": 1000}, color_scheme="light")
    page.goto(notebooks(book)[0].as_uri())
    place = page.locator(".jsm-frame").first
    place.scroll_into_view_if_needed()
    report = page.frame_locator(".jsm-frame").first.locator(".jsm")
    expect(report).to_have_attribute("data-theme", "light")
    expect(report.get_by_role("tab", name="Memory")).to_be_visible()
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    expect(report).to_have_attribute("data-theme", "dark")

    def overlap() -> float:
        return (report.bounding_box() or {})["height"] - (place.bounding_box() or {})["height"]

    until(lambda: -40 < overlap() <= 0, "the frame to be as high as the report")
    report.get_by_role("tab", name="Memory").click()
    until(lambda: -40 < overlap() <= 0, "the frame to follow what its reader opens")
    page.close()


def public(cls: type) -> set[str]:
    """The methods and properties of a class and of those of ours that it is made from."""
    own = (base for base in cls.__mro__ if base.__module__.startswith("jaxshard_magic"))
    kinds = (property, cached_property, classmethod, staticmethod)
    return {
        name
        for base in own
        for name, value in vars(base).items()
        if name[0] != "_" and (isinstance(value, kinds) or callable(value))
    }


def test_every_public_name_and_method_has_its_place(book: dict[Path, Page]):
    ids = set().union(*(page.ids for page in book.values()))
    names = {f"jaxshard_magic.{name}" for name in jaxshard_magic.__all__}
    for name in jaxshard_magic.__all__:
        value = getattr(jaxshard_magic, name)
        if isinstance(value, type):
            names |= {f"jaxshard_magic.{name}.{method}" for method in public(value)}
    assert names - ids == set()
