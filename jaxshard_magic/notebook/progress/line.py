"""One line that is updated in place while something runs, and cleared at the end."""

import threading
import time
from typing import TYPE_CHECKING, Protocol

from ...temporary import Held, Replaced, Temporary, attribute
from ...units import seconds_text

if TYPE_CHECKING:
    from .frontend import Draw
    from .training import Training

FIRST, TICK = 0.25, 0.2  # seconds before the line appears (short work shows nothing), and between updates
LONG = 2.0  # seconds of compiling, from which on there is more to say
LINGER = 1.0  # seconds that it stays when there is nothing to say, so that the page does not jump in between


class View(Protocol):
    """Shows more of a training than a line can, `shown` once it does."""

    @property
    def shown(self) -> bool: ...

    def __call__(self, line: str, share: float | None) -> None: ...


class Progress(Temporary):
    """A context in which calling it with `"compiling for 8 devices"` shows that line and its seconds.

    `draw` is called with the line, and with "" to clear it; None shows nothing. A thread keeps the seconds
    running while this one waits inside the compiler, and tells of the training that it follows, with the share of a
    loop that is done where its length is known. `took`: seconds that the last compile of this took, None where that is
    not known.
    """

    def __init__(self, draw: "Draw | None", of: str = "", took: float | None = None):
        self._draw, self._label, self._took = draw, f"{of}: " if of else "", took
        self._doing, self._since = "", 0.0
        self._training: Training | None = None
        self._view: View | None = None
        self._ended, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._run, args=(draw,), name="jaxshard progress", daemon=True)

    def __call__(self, doing: str) -> None:
        with Held(self._lock):
            self._doing, self._since = doing, time.perf_counter()

    def following(self, training: "Training", view: "View | None" = None) -> Replaced:
        """While nothing else is to be waited for, the line tells how far `training` has come; so does `view` once that
        is shown, and then the line does not."""
        self._view = view
        return Replaced(attribute(self, "_training"), training)

    def begin(self) -> None:
        if isinstance(self._draw, Temporary):
            self._draw.begin()
        if self._draw is not None:
            self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if isinstance(self._draw, Temporary):
            self._draw.end()

    def _run(self, draw: "Draw") -> None:
        shown, at = "", 0.0
        while not self._ended.wait(TICK):
            now = time.perf_counter()
            line, share = self._line(now)
            if line:
                at = now
            viewed = self._view is not None and self._view.shown
            if line != shown and (line or viewed or now - at > LINGER):
                draw(line, share)
                shown = line
        if shown:
            draw("")

    def _while_compiling(self, doing: str, seconds: float) -> str:
        """What to know in a wait for a compiler, once it is one."""
        if seconds < LONG or not doing.startswith("compiling"):
            return ""
        known = self._took is not None and self._took >= LONG  # a shorter one was of other shapes
        took = f"; the last compile of this step took {seconds_text(self._took)}" if known else ""
        return f"{took}; interrupting stops it, and your variables stay as they are"

    def _line(self, now: float) -> tuple[str, float | None]:
        with Held(self._lock):
            doing, seconds, training = self._doing, now - self._since, self._training
        share = None
        if not doing:
            charted = self._view is not None and self._view.shown
            line = training.line(now, charted) if training is not None else ""
            share = training.share if training is not None and line else None
            if self._view is not None:
                self._view(line, share)
                line = "" if self._view.shown else line
        else:
            if training is not None:
                training.pause()
            line = (
                f"{doing}, {seconds:.1f} s{self._while_compiling(doing, seconds)}" if seconds > FIRST else ""
            )
        return self._label + line if line else "", share
