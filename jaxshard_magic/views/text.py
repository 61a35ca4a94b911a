"""Results as text for a terminal: a report, a comparison, a choice, a pipeline, and the metrics of a run."""

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views.document.text import to_text
from jaxshard_magic.views.sections.choice import choice
from jaxshard_magic.views.sections.comparison import comparison
from jaxshard_magic.views.sections.report import report as report_parts
from jaxshard_magic.views.sections.run import pipeline, training
from jaxshard_magic.views.terminal import text_width


def of_report(report: Report, width: int | None = None, leaves: str | int = 8) -> str:
    """Render a report as text; a fix to paste is never broken.

    Args:
        report: Report to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    return to_text(report_parts(report, leaves), text_width(width))


def of_comparison(compared: Comparison, width: int | None = None) -> str:
    """Render the comparison as lines for a terminal. A line to paste is never broken.

    Args:
        compared: Comparison to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return to_text(comparison(compared), text_width(width))


def of_choice(chosen: Choice, width: int | None = None) -> str:
    """Render the choice as lines for a terminal. A line to paste is never broken.

    Args:
        chosen: Result of a search.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return to_text(choice(chosen), text_width(width))


def of_pipeline(p: Pipeline, width: int | None = None) -> str:
    """Render the timeline as lines for a terminal.

    Args:
        p: Pipeline to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    return to_text(pipeline(p), text_width(width))


def of_metrics(metrics: Metrics, width: int) -> str:
    """Render the metrics as lines for a terminal.

    Args:
        metrics: Metrics of a run.
        width: Columns of a line.
    """
    return to_text(training(metrics), width)
