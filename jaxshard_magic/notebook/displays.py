"""Display of the magics' results: the renderer that IPython calls for each public type, and an output that shows
intermediate results in place."""

from collections.abc import Callable
from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..temporary import TemporaryChange

if TYPE_CHECKING:
    from ..codegen import Code
    from ..history import History
    from ..report.choice import Choice
    from ..report.records import Displayable
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
    ("jaxshard_magic.history.store", "History"),
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


class LiveOutput(TemporaryChange):
    """Context with an output that shows the newest intermediate result; the output is emptied at the end.

    Call the object with a result (text and HTML) to display it in place of the previous one.

    Args:
        wanted: Display anything at all.
        view: View of reports in this session, as for `views.show.show`.
        lead: Line above the results. Without a line, a button that interrupts the cell is displayed there.
    """

    def __init__(self, wanted: bool, view: str, lead: str = ""):
        self._wanted, self._view, self._lead = wanted, view, lead
        self._handle: Any = None
        self._remove: Callable[[], None] | None = None

    def __call__(self, shown: "Displayable") -> None:
        """Display `shown` in place of the previous result."""
        if self._wanted:
            above = (f"{self._lead}\n", f"<p>{escape(self._lead)}</p>\n") if self._lead else ("", "")
            self._put(above[0] + shown.to_text(), above[1] + shown.to_html())

    def _put(self, text: str, html: str) -> None:
        data = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def apply(self) -> None:
        """Display the button that interrupts the cell."""
        from ..views.show import show_stop_button

        if self._wanted and not self._lead:
            self._remove = show_stop_button(self._view)

    def revert(self) -> None:
        """Remove the button, and empty the output."""
        if self._remove is not None:
            self._remove()
            self._remove = None
        if self._handle is not None:
            # A front end can't remove a single output of a running cell, so the output is overwritten with nothing.
            self._put("", "")
