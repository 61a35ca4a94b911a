"""The written pages of the repository: their blocks, their headings, their links."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BOOK = sorted(DOCS.rglob("*.md"))
_FENCED = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")


def cells(page: Path) -> list[str]:
    """The page's blocks of Python, each a cell."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def links(page: Path) -> Iterator[str]:
    """Where the page's links and pictures lead, code left out."""
    prose = re.sub(r"`[^`]*`", "", _FENCED.sub("", page.read_text(encoding="utf-8")))
    yield from (link or source for link, source in _LINK.findall(prose))


def anchors(page: Path) -> set[str]:
    """The page's headings as links name them."""
    prose = _FENCED.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
