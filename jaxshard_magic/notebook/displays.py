"""How a notebook shows what the magics return: a Report, compared strategies, a choice, a pipeline, a schedule as one,
compared schedules, an explorer, the history, a program to take home."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..codegen import Code
    from ..explorer import Explorer
    from ..history import History
    from ..report import Pipeline, Report
    from ..report.choice import Choice
    from ..report.comparison import Comparison
    from ..schedule import Comparison as Schedules
    from ..schedule import Schedule
    from .session import ShardSession

_REPORT = ("jaxshard_magic.report", "Report")
_PIPELINE = ("jaxshard_magic.report.pipeline", "Pipeline")
_SCHEDULE = ("jaxshard_magic.schedule.grid", "Schedule")
_SCHEDULES = ("jaxshard_magic.schedule.compare", "Comparison")
_COMPARISON = ("jaxshard_magic.report.comparison", "Comparison")
_CHOICE = ("jaxshard_magic.report.choice", "Choice")
_EXPLORER = ("jaxshard_magic.explorer.explorer", "Explorer")
_HISTORY = ("jaxshard_magic.history.listed", "History")
_CODE = ("jaxshard_magic.codegen.code", "Code")
_WITHOUT_WIDGET = (_CHOICE, _HISTORY, _CODE)


def register(shell: Any, session: "ShardSession") -> None:
    """From here on the notebook shows each of them as the session's `view` says, those made by hand as well."""
    displays, bundles, pages = _formatters(shell)
    displays.for_type_by_name(*_REPORT, partial(_report, session))
    displays.for_type_by_name(*_PIPELINE, partial(_pipeline, session))
    displays.for_type_by_name(*_SCHEDULE, partial(_schedule, session))
    bundles.for_type_by_name(*_SCHEDULES, partial(_schedules_bundle, session))
    displays.for_type_by_name(*_COMPARISON, partial(_comparison, session))
    displays.for_type_by_name(*_EXPLORER, partial(_explorer, session))
    for name in _WITHOUT_WIDGET:
        pages.for_type_by_name(*name, partial(_html, session))


def remove(shell: Any) -> None:
    """Take out what `register` put in."""
    for formatter in _formatters(shell):
        for name in (_REPORT, _PIPELINE, _SCHEDULE, _SCHEDULES, _COMPARISON, _EXPLORER, *_WITHOUT_WIDGET):
            formatter.pop(".".join(name), None)


def _formatters(shell: Any) -> tuple[Any, Any, Any]:
    formatter = shell.display_formatter
    return (
        formatter.ipython_display_formatter,
        formatter.mimebundle_formatter,
        formatter.formatters["text/html"],
    )


def _report(session: "ShardSession", report: "Report") -> None:
    """Displays, or raises NotImplementedError where IPython's own formatters show what is wanted."""
    from ..views.show import show

    show(report, session.view)


def _pipeline(session: "ShardSession", pipeline: "Pipeline") -> None:
    from ..views.show import show_pipeline

    show_pipeline(pipeline, session.view)


def _schedule(session: "ShardSession", schedule: "Schedule") -> None:
    from ..analysis.timeline import timeline

    _pipeline(session, timeline(schedule))


def _schedules_bundle(session: "ShardSession", compared: "Schedules") -> dict[str, str]:
    from ..views import schedules

    text = {"text/plain": schedules.to_text(compared)}
    return text if session.view == "text" else text | {"text/html": schedules.to_html(compared)}


def _comparison(session: "ShardSession", comparison: "Comparison") -> None:
    from ..views.show import show_live

    show_live(comparison, session.view)


def _explorer(session: "ShardSession", explorer: "Explorer") -> None:
    from ..views.show import show_live

    show_live(explorer, session.view)


def _html(session: "ShardSession", shown: "Choice | History | Code") -> str | None:
    """Of what has no widget; IPython has the text of it."""
    return None if session.view == "text" else shown.to_html()
