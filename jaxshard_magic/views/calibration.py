"""Predicted and measured step times as text for a terminal, and as HTML without script."""

from typing import TYPE_CHECKING

from jaxshard_magic.views.format import count_text, printable, rounded
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.html_tags import escaped, join_nonempty, small, table
from jaxshard_magic.views.terminal import plain_signs, terminal_text, text_width, wrap
from jaxshard_magic.views.terminal import table as columns_of

if TYPE_CHECKING:
    from jaxshard_magic.history import Calibration

NONE = "No report has a step that ran on the chip it was predicted for: run one on an attached accelerator."
_HEADS = ("chip", "strategy", "reports", "measured / predicted", "from", "to")


def summary(calibration: "Calibration") -> str:
    """Return one sentence with the number of measured steps and the chips: `12 measured steps on TPU v5e and H100.`"""
    if not calibration.ratios:
        return NONE
    count = sum(each.count for each in calibration.ratios)
    chips = sorted({each.chip for each in calibration.ratios})
    of = f" of {calibration.asked}" if calibration.asked else ""
    return f"{count_text(count)} measured step{'s' * (count != 1)}{of} on {' and '.join(chips)}."


def footnote(calibration: "Calibration") -> str:
    """Return one or two sentences: the meaning of the ratios, and the number of reports without a pair of times."""
    left = f" {count_text(calibration.left)} of the reports have no such pair." if calibration.left else ""
    return f"Above 1: slower than predicted, as of the median; from and to: of single reports.{left}"


def _rows(calibration: "Calibration") -> list[tuple[str, ...]]:
    """Return the printable cells of the table, a row for each chip and strategy."""
    return [
        (
            printable(each.chip),
            printable(each.strategy),
            count_text(each.count),
            *(rounded(value, 2) for value in (each.median, each.low, each.high)),
        )
        for each in calibration.ratios
    ]


def to_text(calibration: "Calibration", width: int | None = None) -> str:
    """Render the calibration as lines for a terminal.

    Args:
        calibration: Ratios of measured to predicted step time.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    room = text_width(width)
    parts = [wrap(plain_signs(summary(calibration)), room)]
    if calibration.ratios:
        columns = dict(zip(_HEADS, zip(*_rows(calibration), strict=True), strict=True))
        parts.append(columns_of({head: list(map(plain_signs, told)) for head, told in columns.items()}, _HEADS[:2]))
        parts.append(wrap(plain_signs(footnote(calibration)), room))
    return "\n\n".join(terminal_text(part) for part in parts)


def to_html(calibration: "Calibration") -> str:
    """Render the calibration as an HTML fragment without script, for a notebook or a page."""
    said = f'<p class="jss-verdict">{escaped(summary(calibration))}</p>'
    if not calibration.ratios:
        return f'<div class="jss">\n{said}\n</div>\n'
    head = [(name, "left" if name in _HEADS[:2] else "right") for name in _HEADS]
    body = [[escaped(cell) for cell in row] for row in _rows(calibration)]
    return (
        "<div "
        f'class="jss">\n{join_nonempty([said, table(head, body), small(escaped(footnote(calibration)))])}\n</div>\n'
    )


def page(calibration: "Calibration") -> str:
    """Render the calibration as a whole HTML document; the theme, light or dark, is the reader's."""
    return document("predicted and measured steps", to_html(calibration))
