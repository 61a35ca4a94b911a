"""What text for a terminal is written with: columns, padding, wrapping, bars and tables."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from typing import TextIO
from unicodedata import east_asian_width

from jaxshard_magic.views.format import MINUS, SPACE, UNKNOWN, printable

EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"

_TERMINAL = str.maketrans({MINUS: "-", UNKNOWN: "-"})
_SPACES = str.maketrans({SPACE: " ", "\u00a0": " "})


# What stands for a sign on a terminal that can't write it, a column each.
_ALIKE = dict(
    zip(
        "\u00a0\u202f–−─│·×’…ℹ↑≥✓✔✖✗⚠█▉▊▋▌▍▎▏░▒▓▚▁▂▃▄▅▆▇",
        "  ---|.x'~i^>++xx!#####:::.=%/_.,-=+*",
        strict=True,
    )
)


def writable(text: str, stream: TextIO | None = None) -> str:
    """`text` with signs in the place of those that `stream`, standard output by default, has no code for."""
    encoding = getattr(sys.stdout if stream is None else stream, "encoding", None) or "utf-8"
    if _encodes(text, encoding):
        return text
    alike = {ord(c): sign for c, sign in _ALIKE.items() if not _encodes(c, encoding)}
    return text.translate(alike).encode(encoding, "replace").decode(encoding)


def _encodes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


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
    """`text` in `width` columns, cut in its middle: `state.params…tn.qkv.kernel`; its beginning says of which kind it
    is, and the end of a path tells most."""
    if cells(text) <= width:
        return text
    first = (width - 1) * 2 // 5
    kept = _fitting(reversed(text), width - 1 - first)
    return text[: _fitting(text, first)] + "\u2026" + text[len(text) - kept :]


def clip(text: str, width: int) -> str:
    """The start of `text` in `width` columns: `x, _ = jax.lax.scan(block, x,…`."""
    return text if cells(text) <= width else text[: _fitting(text, width - 1)] + "\u2026"


def _fitting(text: Iterable[str], width: int) -> int:
    """How many characters from the first on take at most `width` columns."""
    taken = accumulate(map(cells, text))
    return sum(1 for _ in takewhile(lambda columns: columns <= width, taken))


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """`text` in lines of at most `width` columns; a word longer than a line is broken."""
    lines, line, empty = [], first, True
    for word in filter(None, text.split(" ")):
        at, left = 0, cells(word)  # what of the word is on lines already, and the columns of the rest
        if not empty and cells(line) + 1 + left > width:
            lines.append(line)
            line, empty = rest, True
        while cells(line) + left + (not empty) > width:
            room = width - cells(line)
            piece = word[at : at + max(1, room if left == len(word) - at else room // 2)]
            lines.append(line + piece)
            line, at, left = rest, at + len(piece), left - cells(piece)
        line, empty = (line + word[at:] if empty else f"{line} {word[at:]}"), False
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
