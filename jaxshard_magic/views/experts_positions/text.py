"""Experts, positions and ring attention for a terminal."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views.experts_positions.figures import (
    FigureRow,
    RowFigure,
    layout_figures,
    ring_figures,
    ring_memory_lines,
)
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import display_width, pad, plain_signs, wrap
from jaxshard_magic.views.training.chart import BLOCKS

LINE, BARS = 16, 32  # columns: of a line of positions, of a row of bars at most


def lines(report: Report, width: int) -> list[str]:
    """Return the figures of a report as text; empty without experts and positions.

    Args:
        report: Report to show.
        width: Columns of the terminal.
    """
    text_lines: list[str] = []
    for figure in (*layout_figures(report), *ring_figures(report)):
        text_lines += _figure(figure, width)
    return [*text_lines, *(line for held in ring_memory_lines(report) for line in wrap(plain_signs(held), width))]


def _figure(figure: RowFigure, width: int) -> list[str]:
    told = wrap(plain_signs(printable(figure.lead)), width)
    before = max((display_width(row.name) for row in figure.rows), default=0)
    for row in figure.rows:
        first = f"  {pad(row.name, before)}  {_drawn(row)}  "
        told += wrap(plain_signs(printable(row.text)), width, first, " " * (before + 4))
    return told


def _drawn(row: FigureRow) -> str:
    if row.bars:
        return "".join(_block(share) for share in _fewer(row.bars))
    drawn = ["·"] * LINE
    for area in row.areas:
        # Areas below the top are positions within a ring; a line of text has room for the stored order alone.
        if not area.y:
            first = min(LINE - 1, round(area.x * LINE))
            for i in range(first, max(first + 1, min(LINE, round((area.x + area.width) * LINE)))):
                drawn[i] = "█"
    return "".join(drawn)


def _fewer(bars: Sequence[float]) -> list[float]:
    """Return at most `BARS` bars; where several share a column, the highest of them."""
    n = min(BARS, len(bars))
    return [max(bars[i * len(bars) // n : (i + 1) * len(bars) // n]) for i in range(n)]


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if share else " "
