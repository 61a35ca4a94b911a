"""Lines updated in place: as an output of the cell in a notebook, as a row of the terminal elsewhere."""

import shutil
import sys
import threading
from collections.abc import Iterable
from html import escape
from typing import Any, Protocol, TextIO

from ...temporary import AcquiredLock, TemporaryChange

_TEXT = "font-variant-numeric: tabular-nums"
_ROOM = "width: 320px; max-width: 100%; height: 4px; margin: 3px 0; background: rgba(127, 127, 127, .25)"
_DONE = "height: 100%; background: currentColor; opacity: .6"
CLEAR = "\r\x1b[K"  # back to the first column, and erase the row


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
