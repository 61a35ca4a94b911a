"""What text for a terminal is written with: columns, padding, wrapping, bars and tables."""

import shutil
from collections.abc import Iterable, Sequence
from unicodedata import east_asian_width

from jaxshard_magic.views.format import MINUS, SPACE, UNKNOWN, printable

EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"

_TERMINAL = str.maketrans({MINUS: "-", UNKNOWN: "-"})
_SPACES = str.maketrans({SPACE: " ", "\u00a0": " "})


def fitted(width: int | None) -> int:
    """Columns of a text: `width`, the terminal's own where that is None, held between 60 and 100."""
    return max(60, min(100, shutil.get_terminal_size().columns if width is None else width))


def printed(lines: Iterable[str]) -> str:
    """`lines` as one text, with the spaces of a keyboard and none at their ends."""
    return "\n".join(line.translate(_SPACES).rstrip() for line in lines)


def plain(text: str) -> str:
    """Our own words with the minus and the dash of a keyboard."""
    return text.translate(_TERMINAL)


def cells(text: str) -> int:
    """Columns that `text` takes; East Asian wide characters take two."""
    return len(text) + (0 if text.isascii() else sum(east_asian_width(c) in "WF" for c in text))


def pad(text: str, width: int, align: str = "left") -> str:
    """`text` filled up with spaces to `width` columns, at its left or right; a longer one as it is."""
    fill = " " * max(0, width - cells(text))
    return fill + text if align == "right" else text + fill


def shorten(text: str, width: int) -> str:
    """The end of `text` in `width` columns: `…attn.qkv.kernel`; the end of a path tells most."""
    if cells(text) <= width:
        return text
    while cells(text) > width - 1:
        text = text[1:]
    return "\u2026" + text


def clip(text: str, width: int) -> str:
    """The start of `text` in `width` columns: `x, _ = jax.lax.scan(block, x,…`."""
    if cells(text) <= width:
        return text
    while text and cells(text) > width - 1:
        text = text[:-1]
    return text + "\u2026"


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines of at most `width` columns; a word longer than a line is broken."""
    lines, line, empty = [], first, True
    for word in filter(None, text.split(" ")):
        if not empty and cells(line) + 1 + cells(word) > width:
            lines.append(line)
            line, empty = rest, True
        while cells(line) + cells(word) + (not empty) > width:
            room = width - cells(line)
            piece = word[: max(1, room if cells(word) == len(word) else room // 2)]
            lines.append(line + piece)
            line, word = rest, word[len(piece) :]
        line, empty = (line + word if empty else f"{line} {word}"), False
    return [*lines, line]


def wrapped(texts: Iterable[str], width: int, first: str = "", rest: str = "") -> list[str]:
    """The lines of `texts` below each other, each broken by `wrap`, with the minus and the dash of a keyboard."""
    return [line for text in texts for line in wrap(plain(printable(text)), width, first, rest)]


def bar(share: float, width: int) -> str:
    """A bar of `share` of `width` columns, to an eighth of a column."""
    eighths = max(1, round(share * width * 8)) if share > 0 else 0
    return "\u2588" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def table(columns: dict[str, list[str]], lefts: Sequence[str], indent: str = "  ") -> list[str]:
    """Columns under their heads, those in `lefts` aligned left and the others right."""
    widths = {head: max(map(cells, [head, *values])) for head, values in columns.items()}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return [
        indent
        + "  ".join(
            pad(c, widths[h], "left" if h in lefts else "right") for h, c in zip(columns, r, strict=True)
        )
        for r in rows
    ]
