"""Output of a cell with intermediate results, updated in place."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..temporary import TemporaryChange

if TYPE_CHECKING:
    from ..report.records import Displayable


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
