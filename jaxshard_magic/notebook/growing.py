"""An output of the cell that tells what is known so far."""

from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..temporary import Temporary

if TYPE_CHECKING:
    from ..report.written import Shown


class Growing(Temporary):
    """A context in which what it is called with is shown in the cell's output, the newest in the place of the last; at
    its end that is taken away.

    Args:
        wanted: whether anything is shown at all.
        view: how the session shows reports, as for `views.show.show`.
        lead: a line above what is shown; where there is none, a button stands above it that interrupts the cell.
    """

    def __init__(self, wanted: bool, view: str, lead: str = ""):
        self._wanted, self._view, self._lead = wanted, view, lead
        self._handle: Any = None
        self._remove: Callable[[], None] | None = None

    def __call__(self, shown: "Shown") -> None:
        if self._wanted:
            above = (f"{self._lead}\n", f"<p>{escape(self._lead)}</p>\n") if self._lead else ("", "")
            self._put(above[0] + shown.to_text(), above[1] + shown.to_html())

    def _put(self, text: str, html: str) -> None:
        data = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def begin(self) -> None:
        from ..views.show import show_stop

        if self._wanted and not self._lead:
            self._remove = show_stop(self._view)

    def end(self) -> None:
        if self._remove is not None:
            self._remove()
            self._remove = None
        if self._handle is not None:
            self._put("", "")
