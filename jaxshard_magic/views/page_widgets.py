"""Widgets of results on a page without a kernel.

A widget without a title replaces the HTML without script; those with a title follow below it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import PageWidget
from jaxshard_magic.views import explorer_payload
from jaxshard_magic.views.choice.payload import packed_choice
from jaxshard_magic.views.comparison.payload import default_trial, packed_comparison
from jaxshard_magic.views.payload import packed_report
from jaxshard_magic.views.pictures.picture_sets import comparison_pictures, pipeline_pictures, report_pictures
from jaxshard_magic.views.timeline.payload import packed_pipeline

if TYPE_CHECKING:
    from jaxshard_magic.explorer import Explorer
    from jaxshard_magic.schedule.compare import ScheduleComparison


def of_report(report: Report) -> Sequence[PageWidget]:
    """Return the widget of a report."""
    return [PageWidget("report", packed_report(report), pictures=report_pictures(report))]


def of_pipeline(p: Pipeline) -> Sequence[PageWidget]:
    """Return the timeline of a pipeline."""
    return [PageWidget("report", packed_pipeline(p), pictures=pipeline_pictures(p))]


def of_comparison(comparison: Comparison) -> Sequence[PageWidget]:
    """Return the widget of a comparison."""
    return [
        PageWidget("compare", packed_comparison(comparison), _selection(comparison), comparison_pictures(comparison))
    ]


def of_choice(choice: Choice) -> Sequence[PageWidget]:
    """Return the widget of a choice and, below it, that of the report of the choice."""
    comparison = choice.comparison
    chosen = () if choice.report is None else of_report(choice.report)
    return [
        PageWidget("compare", packed_choice(choice), _selection(comparison), comparison_pictures(comparison)),
        *(replace(widget, title="The report of the choice") for widget in chosen),
    ]


def of_schedules(comparison: "ScheduleComparison") -> Sequence[PageWidget]:
    """Return the timeline of each valid schedule."""
    timelines = {row.name: row.schedule.timeline(beside=False) for row in comparison.rows if row.schedule is not None}
    return [replace(widget, title=name) for name, p in timelines.items() for widget in of_pipeline(p)]


def of_explorer(ex: "Explorer") -> Sequence[PageWidget]:
    """Return the widget of an explorer."""
    state = {**explorer_payload.state(ex), "leaf": None, "device": None}
    return [PageWidget("explore", explorer_payload.packed_explorer(ex), state)]


def _selection(comparison: Comparison) -> dict[str, int | None]:
    return {"chosen": default_trial(comparison), "other": None}
