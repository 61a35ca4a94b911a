"""Progress line, updated in place during a cell and cleared at the end."""

import threading
import time
from typing import TYPE_CHECKING, Protocol

from ...temporary import AcquiredLock, Replaced, TemporaryChange, attribute
from ...units import seconds_text

if TYPE_CHECKING:
    from .frontend import Draw
    from .training import LoopProgress

FIRST, TICK = 0.25, 0.2  # seconds before the line appears (short work shows nothing), and between updates
LONG = 2.0  # seconds of a compile before the line says more
LINGER = 1.0  # seconds that a line stays after its action, so that the page does not jump between two actions


class LoopView(Protocol):
    """Display with more of a training than a line; `shown` becomes True once it is visible."""

    @property
    def shown(self) -> bool: ...

    def __call__(self, line: str, share: float | None) -> None: ...


class Progress(TemporaryChange):
    """Context in which a call with "compiling for 8 devices" shows this line, with its seconds.

    A thread updates the line while the main thread waits inside the compiler, and shows the training followed, with the
    finished share of a loop of known length.

    Args:
        draw: Called with the line, and with "" to clear it; None shows nothing.
        label: Name at the beginning of the line.
        last_compile_s: Seconds of the last compile of the same step; None if unknown.
    """

    def __init__(self, draw: "Draw | None", label: str = "", last_compile_s: float | None = None):
        self._draw, self._label, self._last_compile_s = draw, f"{label}: " if label else "", last_compile_s
        self._doing, self._since = "", 0.0
        self._training: LoopProgress | None = None
        self._view: LoopView | None = None
        self._ended, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._run, args=(draw,), name="jaxshard progress", daemon=True)

    def __call__(self, doing: str) -> None:
        """Set the current action; "" for none."""
        with AcquiredLock(self._lock):
            self._doing, self._since = doing, time.perf_counter()

    def following(self, training: "LoopProgress", view: "LoopView | None" = None) -> Replaced:
        """Return a context in which the line shows a training whenever no other action is set.

        Args:
            training: The training.
            view: Display that replaces the line once visible.
        """
        self._view = view
        return Replaced(attribute(self, "_training"), training)

    def apply(self) -> None:
        """Start the thread."""
        if isinstance(self._draw, TemporaryChange):
            self._draw.apply()
        if self._draw is not None:
            self._thread.start()

    def revert(self) -> None:
        """Stop the thread, and clear the line."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if isinstance(self._draw, TemporaryChange):
            self._draw.revert()

    def _run(self, draw: "Draw") -> None:
        """Draw the line several times a second until the end of the context; the body of the thread."""
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

    def _compile_note(self, doing: str, seconds: float) -> str:
        """Return the note added to the line during a long compile: the time of the last compile, and the effect of an
        interrupt."""
        if seconds < LONG or not doing.startswith("compiling"):
            return ""
        # A shorter compile says nothing about this one.
        known = self._last_compile_s is not None and self._last_compile_s >= LONG
        took = f"; the last compile of this step took {seconds_text(self._last_compile_s)}" if known else ""
        return f"{took}; interrupting stops it, and your variables stay as they are"

    def _line(self, now: float) -> tuple[str, float | None]:
        """Return the current line and share; pass both to the view, and pause the training during another action."""
        with AcquiredLock(self._lock):
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
            line = f"{doing}, {seconds:.1f} s{self._compile_note(doing, seconds)}" if seconds > FIRST else ""
        return self._label + line if line else "", share
