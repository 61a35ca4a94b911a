"""The view under a cell that trains: when it appears, how often it is told what is new, and what it leaves behind."""

import threading
import time
from typing import TYPE_CHECKING, Any

from ..temporary import Held, Temporary

if TYPE_CHECKING:
    from ..live import Run
    from ..views.show import Growing

EVIDENT = 2.0  # seconds of training before there is a view
STEPS = 8  # and so many steps
OFTEN, SELDOM = 0.5, 5.0  # seconds between two updates: of a short run, and of a long one
UPDATES = 1000  # that a run of any length is told of: its charts have a tenth as many places
KEEP = 10.0  # seconds between two pictures that a saved notebook keeps, at least
STALE = 0.05  # of the run's time that such a picture may be behind


class TrainingView(Temporary):
    """Shows `run` in the output of its cell, as `how` says; a context, at whose end the widget draws the last of it,
    and what stands for it in a saved notebook goes, unless it `stays`: the report that follows has the same.

    It is called with what the progress line would say: from the thread of that line, which alone draws. `shown` tells
    whether it says so in its place.
    """

    def __init__(self, run: "Run", how: str, wanted: bool = True, stays: bool = False):
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
        """Whether there is a view."""
        return self._output is not None

    def __call__(self, line: str, share: float | None) -> None:
        """Say `line`, of a training of which `share` is done, and draw what is new, where it is time for that."""
        if self._wanted and line:
            with Held(self._lock):
                self._drawn(line, share)

    def begin(self) -> None:
        """There is a view only once the training has run for a while."""

    def end(self) -> None:
        with Held(self._lock):
            self._wanted = False
            if self._output is not None:
                self._line, self._share = "", None
                self._keep(time.perf_counter(), ends=not self._stays)

    def _drawn(self, line: str, share: float | None) -> None:
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
        elif now - self._told_at >= min(SELDOM, max(OFTEN, seconds / UPDATES)):
            self._tell(now)

    def _tell(self, now: float) -> None:
        from ..views.training import payload

        tails = self._run.tails(self._held)
        assert self._output is not None
        self._output.tell(self._update(tails))
        self._held |= payload.held(tails)
        self._told_at = now

    def _keep(self, now: float, *, ends: bool = False) -> None:
        from ..views.show import Growing
        from ..views.training import data, html, payload, text

        tails = self._run.tails({})
        metrics = self._run.metrics(tails)
        if metrics is None:
            return
        self._line = self._line or data.lead_text(metrics)
        whole = self._update(tails)
        static = "" if ends else html.running(metrics, self._line)
        told = "" if ends else "\n".join(text.lines(metrics, 100))
        if self._output is None:
            self._output = Growing(whole, told, static, self._how)
        else:
            self._output.keep(whole, told, static)
        self._held = payload.held(tails)
        self._told_at = self._kept_at = now

    def _update(self, tails: Any) -> dict[str, Any]:
        from ..views.training import payload

        self._number += 1
        return payload.update(self._number, tails, self._line, self._share)
