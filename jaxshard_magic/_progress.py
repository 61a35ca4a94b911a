"""One line that says what a long wait is for, updated in place and cleared at the end."""

import sys
import threading
import time
from collections.abc import Callable
from html import escape
from typing import Any

FIRST, TICK = 0.25, 0.2  # seconds before the line appears (short work shows nothing), and between updates


class Progress:
    """A context in which calling it with `"compiling for 8 devices"` shows that line and its seconds.

    `draw` is called with the line, and with "" to clear it; None shows nothing. A thread keeps the seconds
    running while this one waits inside the compiler.
    """

    def __init__(self, draw: Callable[[str], None] | None, of: str = ""):
        self._draw, self._label = draw, f"{of}: " if of else ""
        self._doing, self._since = "", 0.0
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._run, args=(draw,), name="jaxshard progress", daemon=True)

    def __call__(self, doing: str) -> None:
        with self._lock:
            self._doing, self._since = doing, time.perf_counter()

    def __enter__(self) -> "Progress":
        if self._draw is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._draw is not None:
            self._thread.join()

    def _run(self, draw: Callable[[str], None]) -> None:
        shown = ""
        while not self._ended.wait(TICK):
            with self._lock:
                seconds = time.perf_counter() - self._since
                line = (
                    f"{self._label}{self._doing}, {seconds:.1f} s" if self._doing and seconds > FIRST else ""
                )
            if line != shown:
                draw(line)
                shown = line
        if shown:
            draw("")


def line_for(shell: Any) -> Callable[[str], None] | None:
    """How this frontend updates a line in place; None where nobody watches (a pipe, a test)."""
    if getattr(shell, "kernel", None) is not None:
        return _DisplayedLine()
    return _terminal_line if sys.stderr.isatty() else None


def _terminal_line(line: str) -> None:
    sys.stderr.write(f"\r\x1b[K{line}")
    sys.stderr.flush()


class _DisplayedLine:
    """An output of the cell that is written over; a frontend has no way to take a single output out again."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, line: str) -> None:
        from IPython.display import display

        data = {"text/plain": line, "text/html": f"<div>{escape(line)}</div>" if line else ""}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)
