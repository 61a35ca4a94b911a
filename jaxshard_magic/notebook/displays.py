"""How a notebook shows what the magics return: a Report, compared strategies, a choice, a pipeline, a schedule as one,
compared schedules, an explorer, the history, a program to take home."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..codegen import Code
    from ..history import History
    from ..report.choice import Choice
    from ..schedule import Comparison as Schedules
    from ..schedule import Schedule
    from .session import ShardSession

_WIDGETS = {  # with the function of views.show that displays them
    ("jaxshard_magic.report", "Report"): "show",
    ("jaxshard_magic.report.pipeline", "Pipeline"): "show_pipeline",
    ("jaxshard_magic.report.comparison", "Comparison"): "show_live",
    ("jaxshard_magic.explorer.explorer", "Explorer"): "show_live",
}
_CHOICE = ("jaxshard_magic.report.choice", "Choice")
_SCHEDULE = ("jaxshard_magic.schedule.grid", "Schedule")
_WITHOUT_WIDGET = (
    ("jaxshard_magic.history.listed", "History"),
    ("jaxshard_magic.codegen.code", "Code"),
    ("jaxshard_magic.schedule.compare", "Comparison"),
)


def say(text: str) -> None:
    """Print lines that may have names of the user's or of files, and figures with their signs, on any terminal."""
    from ..views.format import printable_lines
    from ..views.terminal import writable

    print(writable(printable_lines(text)))


def register(shell: Any, session: "ShardSession") -> None:
    """From here on the notebook shows each of them as the session's `view` says, those made by hand as well."""
    displays, pages = _formatters(shell)
    for name, function in _WIDGETS.items():
        displays.for_type_by_name(*name, partial(_display, session, function))
    displays.for_type_by_name(*_CHOICE, partial(_choice, session))
    displays.for_type_by_name(*_SCHEDULE, partial(_schedule, session))
    for name in _WITHOUT_WIDGET:
        pages.for_type_by_name(*name, partial(_html, session))


def remove(shell: Any) -> None:
    """Take out what `register` put in."""
    for formatter in _formatters(shell):
        for name in (*_WIDGETS, _CHOICE, _SCHEDULE, *_WITHOUT_WIDGET):
            formatter.pop(".".join(name), None)


def _formatters(shell: Any) -> tuple[Any, Any]:
    formatter = shell.display_formatter
    return (
        formatter.ipython_display_formatter,
        formatter.formatters["text/html"],
    )


def _display(session: "ShardSession", function: str, value: Any) -> None:
    """Display, or raise NotImplementedError where IPython's own formatters show what is wanted."""
    from ..views import show

    getattr(show, function)(value, session.view)


def _choice(session: "ShardSession", choice: "Choice") -> None:
    """With the report of the cell that went on with it, else of its trial."""
    from ..views import show

    went_on, report = session.went_on
    show.show_choice(choice, report if went_on is choice else choice.report, session.view)


def _schedule(session: "ShardSession", schedule: "Schedule") -> None:
    _display(session, "show_pipeline", schedule.timeline())


def _html(session: "ShardSession", shown: "History | Code | Schedules") -> str | None:
    """Of what has no widget; IPython has the text of it."""
    return None if session.view == "text" else shown.to_html()
