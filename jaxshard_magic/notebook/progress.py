"""Progress line: the reason of a long wait, and the progress of a training loop.

The line is updated in place during a cell and cleared at the end: an output of the cell in a notebook, a row of the
terminal elsewhere. The words about a loop are those of `loop_progress`.
"""

import shutil
import sys
import threading
import time
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from ..temporary import AcquiredLock, Replaced, TemporaryChange, attribute
from ..units import seconds_text

if TYPE_CHECKING:
    from .loop_progress import LoopProgress

FIRST, TICK = 0.25, 0.2  # seconds before the line appears (short work shows nothing), and between updates
LONG = 2.0  # seconds of a compile before the line says more
LINGER = 1.0  # seconds that a line stays after its action, so that the page does not jump between two actions
_TEXT = "font-variant-numeric: tabular-nums"
_ROOM = "width: 320px; max-width: 100%; height: 4px; margin: 3px 0; background: rgba(127, 127, 127, .25)"
_DONE = "height: 100%; background: currentColor; opacity: .6"
CLEAR = "\r\x1b[K"  # back to the first column, and erase the row


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


class Draw(Protocol):
    """Function that shows a line in place of the previous one; "" clears the line. `share`, 0 to 1, adds a bar."""

    def __call__(self, line: str, share: float | None = None) -> None: ...


def line_for(shell: Any) -> Draw | None:
    """Return a function that draws a line in this front end; None if nobody watches (a pipe, a test)."""
    if getattr(shell, "kernel", None) is not None:
        return DisplayedLine()
    return TerminalLine(sys.stderr) if sys.stderr.isatty() else None


class DisplayedLine:
    """Line in an output of a notebook's cell, with a bar below for a known share."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, line: str, share: float | None = None) -> None:
        from IPython.display import display

        html = f'<div style="{_TEXT}">{escape(line)}</div>' if line else ""
        if share is not None:
            html += _bar(share)
        # A front end can't remove a single output of a running cell, so a cleared line is an empty output.
        data = {"text/plain": line, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _bar(share: float) -> str:
    """Return a progress bar as HTML with the attributes of an accessible progress bar."""
    percent = f"{100 * share:.1f}"
    what = f'role="progressbar" aria-label="steps done" aria-valuenow="{percent}"'
    return f'<div {what} style="{_ROOM}"><div style="{_DONE}; width: {percent}%"></div></div>'


class TerminalLine(TemporaryChange):
    """Last row of the terminal. As a context it clears the row before the cell writes to the terminal.

    A row begun and not ended by the cell stays the cell's: its own progress bar is not overwritten.

    Args:
        terminal: Stream to draw on.
    """

    def __init__(self, terminal: TextIO):
        self._terminal = terminal
        self._shown, self._taken = False, False
        # Reentrant, as `write` clears the line while it has the lock.
        self._lock = threading.RLock()
        self._streams: dict[str, _SharedStream] = {}

    def __call__(self, line: str, share: float | None = None) -> None:
        with AcquiredLock(self._lock):
            if self._taken or not (line or self._shown):
                return
            # A line of full width would wrap, and a carriage return goes back to the start of the last row alone.
            self._terminal.write(CLEAR + line[: shutil.get_terminal_size().columns - 1])
            self._terminal.flush()
            self._shown = bool(line)

    def write(self, stream: TextIO, text: str) -> int:
        """Write the cell's `text` to one of its streams; return the number of written characters."""
        with AcquiredLock(self._lock):
            if self._shown:
                self("")
            written = stream.write(text)
            if text:
                # A row without a newline is the cell's own, for example a progress bar.
                self._taken = not text.endswith("\n")
            return written

    def apply(self) -> None:
        """Replace `sys.stdout` and `sys.stderr`, as far as they are terminals."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if name not in self._streams and stream.isatty():
                self._streams[name] = _SharedStream(stream, self)
                setattr(sys, name, self._streams[name])

    def revert(self) -> None:
        """Restore `sys.stdout` and `sys.stderr`, unless the cell has replaced them."""
        for name, beside in self._streams.items():
            # Otherwise the cell has replaced the stream itself, and wants its own.
            if getattr(sys, name) is beside:
                setattr(sys, name, beside.stream)
        self._streams.clear()


class _SharedStream:
    """Stream of a cell on the terminal that also shows the line."""

    def __init__(self, stream: TextIO, line: TerminalLine):
        self.stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.write(self.stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
