"""Which pictures there are of what is shown."""

from collections.abc import Mapping
from functools import partial

from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.sent import Picture
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.payload import tab_ids
from jaxshard_magic.views.pictures import charts
from jaxshard_magic.views.pictures.communication import communication
from jaxshard_magic.views.pictures.layout import layout
from jaxshard_magic.views.pictures.memory import memory


def of_report(report: Report) -> Mapping[str, Picture]:
    """One for each tab of its widget, of the same name."""
    draw = {
        "layout": partial(layout, report),
        "memory": partial(memory, report),
        "communication": partial(communication, report),
        **({} if report.measured is None else {"measured": partial(charts.measured, report.measured)}),
        **({} if report.metrics is None else {"training": partial(charts.training, report.metrics)}),
        **({} if report.pipeline is None else of_pipeline(report.pipeline)),
    }
    return {name: draw[name] for name in tab_ids(report)}


def of_pipeline(p: Pipeline) -> Mapping[str, Picture]:
    """Its timeline."""
    return {"pipeline": partial(charts.pipeline, p)}


def of_comparison(comparison: Comparison) -> Mapping[str, Picture]:
    """Its chart, where two trials have a place in it."""
    return (
        {"comparison": partial(charts.comparison, comparison)} if len(data.points_of(comparison)) > 1 else {}
    )
