"""What HTML says and is made of, for tests that read it."""

import re
from html.parser import HTMLParser

from jaxshard_magic.views.format import SPACE

VOID = {"br", "wbr", "meta", "hr"}
ACTIVE = {"script", "style", "link", "img", "iframe", "object"}


class Reader(HTMLParser):
    """Collects tags, attributes and text; every tag is closed in its order and has an attribute once at most."""

    def __init__(self, html: str):
        super().__init__()
        self.html = html
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> where {self.open} are open"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).replace(SPACE, " ").replace("\u00a0", " ").split())


def without_svg(html: str) -> str:
    return re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL)


def assert_inert(html: str) -> None:
    """Hold that `html` is well-formed, without script, and fetches nothing."""
    read = Reader(html)
    names = {name for name, _ in read.attributes}
    assert not ACTIVE & set(read.tags), ACTIVE & set(read.tags)
    assert not {"src", "href"} & names, names
    assert not any(name.startswith("on") for name in names), names
