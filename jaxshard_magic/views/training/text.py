"""Metrics of a run for a terminal: a row for each number, with its first and last value and a curve of blocks."""

from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views.document.text import to_text as lowered
from jaxshard_magic.views.sections.run import training


def to_text(metrics: Metrics, width: int) -> str:
    """Render the metrics as lines for a terminal.

    Args:
        metrics: Metrics of a run.
        width: Columns of a line.
    """
    return lowered(training(metrics), width)
