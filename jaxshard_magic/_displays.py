"""How a notebook shows what the magics return: a Report, compared strategies, a choice, a pipeline, a schedule as one,
compared schedules, the history."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxshard_magic.history import History
    from jaxshard_magic.report import Pipeline, Report
    from jaxshard_magic.report.choice import Choice
    from jaxshard_magic.report.comparison import Comparison
    from jaxshard_magic.schedule import Comparison as Schedules
    from jaxshard_magic.schedule import Schedule
    from jaxshard_magic.session import ShardSession

_REPORT = ("jaxshard_magic.report", "Report")
_PIPELINE = ("jaxshard_magic.report.pipeline", "Pipeline")
_SCHEDULE = ("jaxshard_magic.schedule.grid", "Schedule")
_SCHEDULES = ("jaxshard_magic.schedule.compare", "Comparison")
_COMPARISON = ("jaxshard_magic.report.comparison", "Comparison")
_CHOICE = ("jaxshard_magic.report.choice", "Choice")
_HISTORY = ("jaxshard_magic.history.listed", "History")


def register(shell: Any, session: "ShardSession") -> None:
    """From here on the notebook shows each of them as the session's `view` says, those made by hand as well."""
    displays, bundles = _formatters(shell)
    displays.for_type_by_name(*_REPORT, partial(_report, session))
    displays.for_type_by_name(*_PIPELINE, partial(_pipeline, session))
    displays.for_type_by_name(*_SCHEDULE, partial(_schedule, session))
    bundles.for_type_by_name(*_SCHEDULES, partial(_schedules_bundle, session))
    displays.for_type_by_name(*_COMPARISON, partial(_comparison, session))
    for written in (_CHOICE, _HISTORY):
        bundles.for_type_by_name(*written, partial(_bundle, session))


def remove(shell: Any) -> None:
    """Take out what `register` put in."""
    for formatter in _formatters(shell):
        for name in (_REPORT, _PIPELINE, _SCHEDULE, _SCHEDULES, _COMPARISON, _CHOICE, _HISTORY):
            formatter.pop(".".join(name), None)


def _formatters(shell: Any) -> tuple[Any, Any]:
    formatter = shell.display_formatter
    return formatter.ipython_display_formatter, formatter.mimebundle_formatter


def _report(session: "ShardSession", report: "Report") -> None:
    """Displays, or raises NotImplementedError where IPython's own formatters show what is wanted."""
    from jaxshard_magic.views.show import show

    show(report, session.view)


def _pipeline(session: "ShardSession", pipeline: "Pipeline") -> None:
    from jaxshard_magic.views.show import show_pipeline

    show_pipeline(pipeline, session.view)


def _schedule(session: "ShardSession", schedule: "Schedule") -> None:
    from jaxshard_magic.analysis.timeline import timeline

    _pipeline(session, timeline(schedule))


def _schedules_bundle(session: "ShardSession", compared: "Schedules") -> dict[str, str]:
    from jaxshard_magic.views import schedules

    text = {"text/plain": schedules.to_text(compared)}
    return text if session.view == "text" else text | {"text/html": schedules.to_html(compared)}


def _comparison(session: "ShardSession", comparison: "Comparison") -> None:
    from jaxshard_magic.views.show import show_comparison

    show_comparison(comparison, session.view)


def _bundle(session: "ShardSession", shown: "Choice | History") -> dict[str, str]:
    """Of what has no widget."""
    text = {"text/plain": shown.to_text()}
    return text if session.view == "text" else text | {"text/html": shown.to_html()}
