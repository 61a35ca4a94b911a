"""Charts below a training cell: the time of their appearance, the rate of updates, and the picture kept in the
notebook."""

import threading
import time
from typing import TYPE_CHECKING, Any

from ..temporary import AcquiredLock, TemporaryChange

if TYPE_CHECKING:
    from ..live import LiveRun
    from ..views.show import Growing

EVIDENT = 2.0  # seconds of training before the charts appear
STEPS = 8  # and so many steps
MIN_UPDATE_S, MAX_UPDATE_S = 0.5, 5.0  # seconds between two updates, in a short and in a long run
UPDATES = 1000  # in a run of any length; charts have a tenth as many points
KEEP = 10.0  # least seconds between two static pictures for the saved notebook
STALE = 0.05  # share of the run's time that a static picture may be behind


class TrainingOutput(TemporaryChange):
    """Context that displays the metrics of `run` in the output of its cell.

    Call the object with the text of the progress line, from the thread of the line: only this thread draws. At the end
    the widget draws the last values.

    Args:
        run: Metrics of the running loop.
        how: View of reports in this session.
        wanted: Display anything at all.
        stays: Keep the static picture in a saved notebook at the end. By default the picture is removed, as the report
            below has the same content.
    """

    def __init__(self, run: "LiveRun", how: str, wanted: bool = True, stays: bool = False):
        from ..views.show import shows_growing

        self._run, self._how, self._stays = run, how, stays
        self._wanted = wanted and shows_growing(how)
        self._output: Growing | None = None
        self._began: float | None = None
        self._number, self._held = 0, dict[str, tuple[int, int]]()
        self._told_at = self._kept_at = 0.0
        self._line: str = ""
        self._share: float | None = None
        self._lock = threading.RLock()

    @property
    def shown(self) -> bool:
        """True once the charts are visible; the progress line then stays empty."""
        return self._output is not None

    def __call__(self, line: str, share: float | None) -> None:
        """Show `line` with the charts, and draw new values if an update is due.

        Args:
            line: Text of the progress line.
            share: Finished part of the training, 0 to 1; None if unknown.
        """
        if self._wanted and line:
            with AcquiredLock(self._lock):
                self._drawn(line, share)

    def apply(self) -> None:
        """Display nothing: the charts appear once the training has run for a while."""

    def revert(self) -> None:
        """Draw the last values."""
        with AcquiredLock(self._lock):
            self._wanted = False
            if self._output is not None:
                self._line, self._share = "", None
                self._keep(time.perf_counter(), ends=not self._stays)

    def _drawn(self, line: str, share: float | None) -> None:
        """Create the charts, keep a picture, or send an update, whichever is due."""
        now = time.perf_counter()
        self._line, self._share = line, share
        if self._began is None:
            self._began = now
        seconds = now - self._began
        if self._output is None:
            if seconds >= EVIDENT and self._run.steps >= STEPS:
                self._keep(now)
        elif now - self._kept_at >= max(KEEP, STALE * seconds):
            self._keep(now)
        elif now - self._told_at >= min(MAX_UPDATE_S, max(MIN_UPDATE_S, seconds / UPDATES)):
            self._tell(now)

    def _tell(self, now: float) -> None:
        """Send the new values to the widget."""
        from ..views.training import payload

        tails = self._run.tails(self._held)
        assert self._output is not None
        self._output.tell(self._update(tails))
        self._held |= payload.bucket_counts(tails)
        self._told_at = now

    def _keep(self, now: float, *, ends: bool = False) -> None:
        """Send all values to the widget, and replace the static picture of the saved notebook.

        Args:
            now: Current time in seconds.
            ends: Remove the static picture.
        """
        from ..views import html, text
        from ..views.show import Growing
        from ..views.training import data, payload

        tails = self._run.tails({})
        metrics = self._run.metrics(tails)
        if metrics is None:
            return
        self._line = self._line or data.summary_text(metrics)
        whole = self._update(tails)
        static = "" if ends else html.of_running(metrics, self._line)
        told = "" if ends else text.of_metrics(metrics, 100)
        if self._output is None:
            self._output = Growing(whole, told, static, self._how)
        else:
            self._output.keep(whole, told, static)
        self._held = payload.bucket_counts(tails)
        self._told_at = self._kept_at = now

    def _update(self, tails: Any) -> dict[str, Any]:
        """Return the next message for the widget."""
        from ..views.training import payload

        self._number += 1
        return payload.update_payload(self._number, tails, self._line, self._share)
