"""Experts, positions and turns for a terminal."""

from collections.abc import Sequence

from jaxshard_magic.report import Report
from jaxshard_magic.views.divided.figures import Figure, Row, held_lines, layout_figures, turn_figures
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.terminal import cells, pad, plain, wrap
from jaxshard_magic.views.training.chart import BLOCKS

LINE, BARS = 16, 32  # columns of a drawing


def lines(report: Report, width: int) -> list[str]:
    """Which device has which experts and positions, the rows of each expert, and the turns of each ring; nothing of a
    report without any."""
    found: list[str] = []
    for figure in (*layout_figures(report), *turn_figures(report)):
        found += _figure(figure, width)
    return [*found, *(line for held in held_lines(report) for line in wrap(plain(held), width))]


def _figure(figure: Figure, width: int) -> list[str]:
    told = wrap(plain(printable(figure.lead)), width)
    before = max((cells(row.name) for row in figure.rows), default=0)
    for row in figure.rows:
        first = f"  {pad(row.name, before)}  {_drawn(row)}  "
        told += wrap(plain(printable(row.text)), width, first, " " * (before + 4))
    return told


def _drawn(row: Row) -> str:
    if row.bars:
        return "".join(_block(share) for share in _fewer(row.bars))
    drawn = ["·"] * LINE
    for area in row.areas:
        if not area.y:
            first = min(LINE - 1, round(area.x * LINE))
            for i in range(first, max(first + 1, min(LINE, round((area.x + area.width) * LINE)))):
                drawn[i] = "█"
    return "".join(drawn)


def _fewer(bars: Sequence[float]) -> list[float]:
    """Of more bars than there are columns the highest of those that share one."""
    n = min(BARS, len(bars))
    return [max(bars[i * len(bars) // n : (i + 1) * len(bars) // n]) for i in range(n)]


def _block(share: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if share else " "
