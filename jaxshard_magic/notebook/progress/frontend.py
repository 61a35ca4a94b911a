"""How a frontend updates a line in place: an output of the cell, or a row of the terminal."""

import shutil
import sys
import threading
from collections.abc import Iterable
from html import escape
from typing import Any, Protocol, TextIO

from ...temporary import Held, Temporary

_TEXT = "font-variant-numeric: tabular-nums"
_ROOM = "width: 320px; max-width: 100%; height: 4px; margin: 3px 0; background: rgba(127, 127, 127, .25)"
_DONE = "height: 100%; background: currentColor; opacity: .6"
CLEAR = "\r\x1b[K"  # back to the first column, and erase the row


class Draw(Protocol):
    """Shows a line in the place of the last one, "" for none; with a `share` from 0 to 1, how much is done."""

    def __call__(self, line: str, share: float | None = None) -> None: ...


def line_for(shell: Any) -> Draw | None:
    """How this frontend updates a line in place; None where nobody watches (a pipe, a test)."""
    if getattr(shell, "kernel", None) is not None:
        return DisplayedLine()
    return TerminalLine(sys.stderr) if sys.stderr.isatty() else None


class DisplayedLine:
    """An output of the cell that is written over; a frontend has no way to take a single output out again. Below a line
    with a share stands a bar."""

    def __init__(self) -> None:
        self._handle: Any = None

    def __call__(self, line: str, share: float | None = None) -> None:
        from IPython.display import display

        html = f'<div style="{_TEXT}">{escape(line)}</div>' if line else ""
        if share is not None:
            html += _bar(share)
        data = {"text/plain": line, "text/html": html}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _bar(share: float) -> str:
    percent = f"{100 * share:.1f}"
    what = f'role="progressbar" aria-label="steps done" aria-valuenow="{percent}"'
    return f'<div {what} style="{_ROOM}"><div style="{_DONE}; width: {percent}%"></div></div>'


class TerminalLine(Temporary):
    """The terminal's last row. As a context it makes way for what the cell itself writes there.

    A row that the cell has begun and not ended is the cell's: a progress bar of its own keeps it.
    """

    def __init__(self, terminal: TextIO):
        self._terminal = terminal
        self._shown, self._taken = False, False
        self._lock = threading.RLock()
        self._streams: dict[str, _Beside] = {}

    def __call__(self, line: str, share: float | None = None) -> None:
        with Held(self._lock):
            if self._taken or not (line or self._shown):
                return
            self._terminal.write(CLEAR + line[: shutil.get_terminal_size().columns - 1])
            self._terminal.flush()
            self._shown = bool(line)

    def write(self, stream: TextIO, text: str) -> int:
        """Write the cell's `text` to its stream."""
        with Held(self._lock):
            if self._shown:
                self("")
            written = stream.write(text)
            if text:
                self._taken = not text.endswith("\n")
            return written

    def begin(self) -> None:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if name not in self._streams and stream.isatty():
                self._streams[name] = _Beside(stream, self)
                setattr(sys, name, self._streams[name])

    def end(self) -> None:
        for name, beside in self._streams.items():
            if getattr(sys, name) is beside:  # else the cell has put another one there, and wants it
                setattr(sys, name, beside.stream)
        self._streams.clear()


class _Beside:
    """A stream that shares its terminal with a line."""

    def __init__(self, stream: TextIO, line: TerminalLine):
        self.stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.write(self.stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
