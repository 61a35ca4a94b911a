"""Predicted beside measured steps as text for a terminal, and as HTML without script."""

from typing import TYPE_CHECKING

from jaxshard_magic.views.format import count_text, printable, rounded
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import joined, small, table, text
from jaxshard_magic.views.terminal import fitted, plain, printed, wrap
from jaxshard_magic.views.terminal import table as columns_of

if TYPE_CHECKING:
    from jaxshard_magic.history import Calibration

NONE = "No report has a step that ran on the chip it was predicted for: run one on an attached accelerator."
_HEADS = ("chip", "strategy", "reports", "measured / predicted", "from", "to")


def lead(found: "Calibration") -> str:
    """`12 measured steps on TPU v5e and H100.`"""
    if not found.ratios:
        return NONE
    count = sum(each.count for each in found.ratios)
    chips = sorted({each.chip for each in found.ratios})
    of = f" of {found.asked}" if found.asked else ""
    return f"{count_text(count)} measured step{'s' * (count != 1)}{of} on {' and '.join(chips)}."


def note(found: "Calibration") -> str:
    """What the figures are, and what is not among them."""
    left = f" {count_text(found.left)} of the reports have no such pair." if found.left else ""
    return f"Above 1: slower than predicted, as of the median; from and to: of single reports.{left}"


def _rows(found: "Calibration") -> list[tuple[str, ...]]:
    return [
        (
            printable(each.chip),
            printable(each.strategy),
            count_text(each.count),
            *(rounded(value, 2) for value in (each.median, each.low, each.high)),
        )
        for each in found.ratios
    ]


def to_text(found: "Calibration", width: int | None = None) -> str:
    """In lines of at most `width` columns, the terminal's by default, held between 60 and 100."""
    room = fitted(width)
    parts = [wrap(plain(lead(found)), room)]
    if found.ratios:
        columns = dict(zip(_HEADS, zip(*_rows(found), strict=True), strict=True))
        parts.append(columns_of({head: list(map(plain, told)) for head, told in columns.items()}, _HEADS[:2]))
        parts.append(wrap(plain(note(found)), room))
    return "\n\n".join(printed(part) for part in parts)


def to_html(found: "Calibration") -> str:
    """As a fragment to stand in a notebook or a page, without script."""
    said = f'<p class="jss-verdict">{text(lead(found))}</p>'
    if not found.ratios:
        return f'<div class="jss">\n{said}\n</div>\n'
    head = [(name, "left" if name in _HEADS[:2] else "right") for name in _HEADS]
    body = [[text(cell) for cell in row] for row in _rows(found)]
    return f'<div class="jss">\n{joined([said, table(head, body), small(text(note(found)))])}\n</div>\n'


def page(found: "Calibration") -> str:
    """As a whole document that follows the reader's light or dark theme."""
    return document("predicted and measured steps", to_html(found))
