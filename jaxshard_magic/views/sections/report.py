"""A whole report as parts of a document: the sections and their order, for all forms."""

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Report
from jaxshard_magic.views.document.parts import Part
from jaxshard_magic.views.sections import communication, layout, memory, run, summary


def report(report: Report, leaves: str | int = 8, *, page: bool = False) -> list[Part]:
    """Return what a report says.

    Args:
        report: Report to show.
        leaves: Number of the largest rows of leaves, or "all" for every leaf.
        page: Whether it is for a page, where tables may be longer. Its first drawing is that of the predicted step.

    Raises:
        ShardError: `leaves` is neither a number nor "all".
    """
    if leaves != "all" and not isinstance(leaves, int):
        raise ShardError(f"leaves is {leaves!r}; it is a number, or 'all' for every leaf")
    step = summary.predicted_step(report)
    figures = [*summary.key_figures(report), *summary.options(report), *summary.hints(report)]
    check, timing = summary.check(report), summary.timing(report)
    return [
        summary.head(report),
        *(step + figures if page else figures + step),
        *memory.memory(report, page=page),
        *communication.communication(report, page=page),
        *run.measured(report, page=page),
        *layout.experts_positions(report),
        *layout.layout(report, None if isinstance(leaves, str) else leaves),
        *run.pipeline(report.pipeline),
        *run.training(report.metrics, page=page),
        *(timing + check if page else check + timing),
    ]
