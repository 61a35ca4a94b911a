"""Predicted and measured step times as text for a terminal, and as HTML without script."""

from typing import TYPE_CHECKING

from jaxshard_magic.views.document import html, text
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import count_text, rounded
from jaxshard_magic.views.html_tags import document
from jaxshard_magic.views.terminal import text_width

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


def _parts(calibration: "Calibration") -> list[doc.Part]:
    """Return the summary, a table with a row for each chip and strategy, and the meaning of its ratios."""
    lead = doc.Paragraph(summary(calibration), leading=True)
    if not calibration.ratios:
        return [lead]
    rows = (
        (each.chip, each.strategy, count_text(each.count), *(rounded(v, 2) for v in (each.median, each.low, each.high)))
        for each in calibration.ratios
    )
    columns = tuple(doc.Column(head, "right" if i > 1 else "left") for i, head in enumerate(_HEADS))
    table = doc.Table(columns, tuple(doc.TableRow(tuple(doc.WordCell(cell) for cell in row)) for row in rows))
    return [lead, table, doc.Notes((footnote(calibration),), below=False)]


def to_text(calibration: "Calibration", width: int | None = None) -> str:
    """Render the calibration as lines for a terminal.

    Args:
        calibration: Ratios of measured to predicted step time.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return text.to_text(_parts(calibration), text_width(width))


def to_html(calibration: "Calibration") -> str:
    """Render the calibration as an HTML fragment without script, for a notebook or a page."""
    return html.to_html(_parts(calibration), html.NO_MESH)


def page(calibration: "Calibration") -> str:
    """Render the calibration as a whole HTML document; the theme, light or dark, is the reader's."""
    return document("predicted and measured steps", to_html(calibration))
