"""Pictures by name, for reports, pipelines, comparisons and choices."""

from collections.abc import Mapping
from functools import partial

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.choice import Choice
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.exports import Picture
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.payload import tab_ids
from jaxshard_magic.views.pictures import charts
from jaxshard_magic.views.pictures.communication import communication
from jaxshard_magic.views.pictures.layout import layout
from jaxshard_magic.views.pictures.memory import memory


def report_pictures(report: Report) -> Mapping[str, Picture]:
    """Return the pictures of a report, one for each tab of its widget, under the tab's name."""
    draw = {
        "layout": partial(layout, report),
        "memory": partial(memory, report),
        "communication": partial(communication, report),
        **({} if report.measured is None else {"measured": partial(charts.measured, report.measured)}),
        **({} if report.metrics is None else {"training": partial(charts.training, report.metrics)}),
        **({} if report.pipeline is None else pipeline_pictures(report.pipeline)),
    }
    return {name: draw[name] for name in tab_ids(report)}


def pipeline_pictures(p: Pipeline) -> Mapping[str, Picture]:
    """Return the picture of a pipeline's timeline."""
    return {"pipeline": partial(charts.pipeline, p)}


def comparison_pictures(comparison: Comparison) -> Mapping[str, Picture]:
    """Return the chart of a comparison; empty for fewer than two points."""
    return {"comparison": partial(charts.comparison, comparison)} if len(data.trial_points(comparison)) > 1 else {}


def choice_pictures(choice: Choice) -> Mapping[str, Picture]:
    """Return the pictures of the compiled candidates, and of the report of the choice."""
    chosen = {} if choice.report is None else report_pictures(choice.report)
    return {**comparison_pictures(choice.comparison), **chosen}
