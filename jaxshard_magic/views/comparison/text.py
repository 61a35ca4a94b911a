"""Comparison of strategies for a terminal: answers, a row for each trial, and the line that runs each trial again."""

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views.document.text import to_text as lowered
from jaxshard_magic.views.sections.comparison import comparison
from jaxshard_magic.views.terminal import text_width


def to_text(compared: Comparison, width: int | None = None) -> str:
    """Render the comparison as lines for a terminal. A line to paste is never broken.

    Args:
        compared: Comparison to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return lowered(comparison(compared), text_width(width))
