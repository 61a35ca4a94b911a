"""Text for terminals: display width, padding, wrapping, bars and tables."""

import shutil
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile
from unicodedata import east_asian_width

from jaxshard_magic.views.format import MINUS, SPACE, UNKNOWN, printable

EIGHTHS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"

_TERMINAL = str.maketrans({MINUS: "-", UNKNOWN: "-"})
_SPACES = str.maketrans({SPACE: " ", "\u00a0": " "})


def text_width(width: int | None) -> int:
    """Return the width of a text in columns, clamped to 60 to 100; None takes the width of the terminal."""
    return max(60, min(100, shutil.get_terminal_size().columns if width is None else width))


def terminal_text(lines: Iterable[str]) -> str:
    """Join lines; special spaces become ordinary ones, and trailing spaces are dropped."""
    return "\n".join(line.translate(_SPACES).rstrip() for line in lines)


def plain_signs(text: str) -> str:
    """Return text with the minus and the dash of a keyboard; meant for words of this package."""
    return text.translate(_TERMINAL)


def display_width(text: str) -> int:
    """Return the number of columns taken by `text`; East Asian wide characters take two."""
    return len(text) + (0 if text.isascii() else sum(east_asian_width(c) in "WF" for c in text))


def pad(text: str, width: int, align: str = "left") -> str:
    """Fill a text with spaces.

    Args:
        text: A longer text stays as is.
        width: Columns.
        align: "left" fills after the text, "right" before.
    """
    fill = " " * max(0, width - display_width(text))
    return fill + text if align == "right" else text + fill


def shorten(text: str, width: int) -> str:
    """Cut a text in the middle: `state.params…tn.qkv.kernel`.

    Args:
        text: Text on one line.
        width: Maximal number of columns.
    """
    if display_width(text) <= width:
        return text
    # The end of a path tells which leaf it is, the beginning its kind: the end gets three fifths.
    first = (width - 1) * 2 // 5
    kept = _fitting(reversed(text), width - 1 - first)
    return text[: _fitting(text, first)] + "\u2026" + text[len(text) - kept :]


def clip(text: str, width: int) -> str:
    """Cut a text at the end: `x, _ = jax.lax.scan(block, x,…`.

    Args:
        text: Text on one line.
        width: Maximal number of columns.
    """
    return text if display_width(text) <= width else text[: _fitting(text, width - 1)] + "\u2026"


def _fitting(text: Iterable[str], width: int) -> int:
    """Return the length of the longest prefix with at most `width` columns."""
    taken = accumulate(map(display_width, text))
    return sum(1 for _ in takewhile(lambda columns: columns <= width, taken))


def wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Break a text into lines; a word longer than a line is broken.

    Args:
        text: Text on one line.
        width: Maximal number of columns.
        first: Indentation or mark of the first line.
        rest: Indentation of all other lines.
    """
    lines, line, empty = [], first, True
    for word in filter(None, text.split(" ")):
        # Number of characters of the word that are on lines already, and columns of the others.
        at, left = 0, display_width(word)
        if not empty and display_width(line) + 1 + left > width:
            lines.append(line)
            line, empty = rest, True
        while display_width(line) + left + (not empty) > width:
            room = width - display_width(line)
            # A character takes at most two columns, so `room // 2` characters fit in any case.
            piece = word[at : at + max(1, room if left == len(word) - at else room // 2)]
            lines.append(line + piece)
            line, at, left = rest, at + len(piece), left - display_width(piece)
        line, empty = (line + word[at:] if empty else f"{line} {word[at:]}"), False
    return [*lines, line]


def wrap_all(texts: Iterable[str], width: int, first: str = "", rest: str = "") -> list[str]:
    """Break several texts into lines, with the minus and the dash of a keyboard.

    Args:
        texts: Texts, each starting a new line.
        width: Maximal number of columns.
        first: Indentation or mark of the first line of each text.
        rest: Indentation of all other lines.
    """
    return [line for text in texts for line in wrap(plain_signs(printable(text)), width, first, rest)]


def bar(share: float, width: int) -> str:
    """Return a bar for a share of `width` columns, accurate to an eighth of a column; a positive share is never
    empty."""
    eighths = max(1, round(share * width * 8)) if share > 0 else 0
    return "\u2588" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def table(columns: dict[str, list[str]], lefts: Sequence[str], indent: str = "  ") -> list[str]:
    """Return the lines of a table.

    Args:
        columns: Cells of each column by heading.
        lefts: Headings of columns aligned to the left; others are aligned to the right.
        indent: Prefix of each line.
    """
    widths = {head: max(map(display_width, [head, *values])) for head, values in columns.items()}
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return [
        indent
        + "  ".join(pad(c, widths[h], "left" if h in lefts else "right") for h, c in zip(columns, r, strict=True))
        for r in rows
    ]
