"""Display of the magics' results: which renderer IPython calls for each public type."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..codegen import Code
    from ..history import History
    from ..report.choice import Choice
    from ..schedule import Schedule
    from ..schedule import ScheduleComparison as Schedules
    from .session import ShardSession

_WIDGETS = {  # each with its function in `views.show`
    ("jaxshard_magic.report", "Report"): "show",
    ("jaxshard_magic.report.pipeline", "Pipeline"): "show_pipeline",
    ("jaxshard_magic.report.comparison", "Comparison"): "show_live",
    ("jaxshard_magic.explorer.explorer", "Explorer"): "show_live",
}
_CHOICE = ("jaxshard_magic.report.choice", "Choice")
_SCHEDULE = ("jaxshard_magic.schedule.grid", "Schedule")
_WITHOUT_WIDGET = (
    ("jaxshard_magic.history.history_table", "History"),
    ("jaxshard_magic.codegen.code", "Code"),
    ("jaxshard_magic.schedule.compare", "ScheduleComparison"),
)


def say(text: str) -> None:
    """Print text, of one or several lines, with a substitute for each character that the terminal can't print or
    encode.

    Texts may have names of the user's or of files.
    """
    from ..display import writable
    from ..views.format import printable_lines

    print(writable(printable_lines(text)))


def register(shell: Any, session: "ShardSession") -> None:
    """Register display functions, so that results appear as `session.view` says, also results made without a magic."""
    displays, pages = _formatters(shell)
    for name, function in _WIDGETS.items():
        # Registered by name: the types' modules are imported only when a value is displayed.
        displays.for_type_by_name(*name, partial(_display, session, function))
    displays.for_type_by_name(*_CHOICE, partial(_choice, session))
    displays.for_type_by_name(*_SCHEDULE, partial(_schedule, session))
    for name in _WITHOUT_WIDGET:
        pages.for_type_by_name(*name, partial(_html, session))


def remove(shell: Any) -> None:
    """Remove the display functions registered by `register`."""
    for formatter in _formatters(shell):
        for name in (*_WIDGETS, _CHOICE, _SCHEDULE, *_WITHOUT_WIDGET):
            formatter.pop(".".join(name), None)


def _formatters(shell: Any) -> tuple[Any, Any]:
    """Return IPython's formatter for self-displaying objects and the formatter for HTML."""
    formatter = shell.display_formatter
    return (formatter.ipython_display_formatter, formatter.formatters["text/html"])


def _display(session: "ShardSession", function: str, value: Any) -> None:
    """Display a value with a function of `views.show`.

    Raises:
        NotImplementedError: IPython's own formatters give the wanted view.
    """
    from ..views import show

    getattr(show, function)(value, session.view)


def _choice(session: "ShardSession", choice: "Choice") -> None:
    """Display a choice, with the report of the cell that continued with it, otherwise the report of its trial."""
    from ..views import show

    went_on, report = session.went_on
    show.show_choice(choice, report if went_on is choice else choice.report, session.view)


def _schedule(session: "ShardSession", schedule: "Schedule") -> None:
    """Display a pipeline schedule as its timeline."""
    _display(session, "show_pipeline", schedule.timeline())


def _html(session: "ShardSession", shown: "History | Code | Schedules") -> str | None:
    """Return the HTML of a value without widget; None for the text view, rendered by IPython."""
    return None if session.view == "text" else shown.to_html()
