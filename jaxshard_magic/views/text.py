"""A report as text for a terminal, 60 to 100 columns wide."""

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Report
from jaxshard_magic.views.document.parts import Part
from jaxshard_magic.views.document.text import to_text
from jaxshard_magic.views.sections import communication, layout, measured, memory, run, summary
from jaxshard_magic.views.terminal import text_width


def render(report: Report, width: int | None = None, leaves: str | int = 8) -> str:
    """Render a report as text; a fix to paste is never broken.

    Args:
        report: Report to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    return to_text(document(report, leaves), text_width(width))


def document(report: Report, leaves: str | int = 8) -> list[Part]:
    """Return what a report says, as much as is read at once.

    Args:
        report: Report to show.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    if leaves != "all" and not isinstance(leaves, int):
        raise ShardError(f"leaves is {leaves!r}; it is a number, or 'all' for every leaf")
    return [
        summary.head(report),
        *summary.key_figures(report),
        *summary.options(report),
        *summary.hints(report),
        *summary.predicted_step(report),
        *memory.memory(report),
        *communication.communication(report),
        *measured.measured(report),
        *layout.experts_positions(report),
        *layout.layout(report, None if isinstance(leaves, str) else leaves),
        *run.pipeline(report.pipeline),
        *run.training(report.metrics),
        *summary.check(report),
        *summary.timing(report),
    ]
