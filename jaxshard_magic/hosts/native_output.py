"""Capture output written to file descriptor 1 outside Python on a host, without gloo's lines.

ipykernel captures the descriptor too, but mixes such output with Python's, so that its lines can't be separated, and
cuts multi-byte characters in two.

Whenever devices of several processes connect, jaxlib's gloo writes a line for each (jaxlib 0.10.2, 0.12.0) on file
descriptor 1:

    [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1

Several threads write at once and piece by piece, so lines are interleaved, number by number. Only text that consists of
such lines, in any interleaving, is removed; all other text is left.
"""

import codecs
import ctypes
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

STDOUT = 1
HELD_S = 1.0  # to wait for the rest of a gloo line
# Bytes buffered while Python runs something else: with Linux's default of 64 KiB a talkative library would block.
PIPE = 2**20
_now: "list[NativeOutput]" = []

RANK = "[Gloo] Rank "
# The pieces of one line, in the order in which a thread writes them; None for a number.
PIECES = (
    RANK,
    None,
    " is connected to ",
    None,
    " peer ranks. ",
    "Expected number of connected peer ranks is : ",
    None,
    "\n",
)
_DIGITS = 4  # at most, of one number
_LINES = 512  # at most, interleaved


class NativeOutput:
    """Redirection of file descriptor 1 to `sys.stdout`, from construction until `restore`."""

    def __init__(self) -> None:
        self._before = os.dup(STDOUT)
        self._read, write = os.pipe()
        with suppress(OSError):  # above the limit of this user
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE)
        os.dup2(write, STDOUT)
        os.close(write)
        # Incremental: a read may end inside a multi-byte character.
        self._filter, self._decoder = GlooFilter(), codecs.getincrementaldecoder("utf-8")("replace")
        self._busy = threading.Lock()  # between reading of output and its display, for `flush`
        threading.Thread(target=self._run, name="jaxshard output", daemon=True).start()

    def flush(self, seconds: float = 2.0) -> None:
        """Wait until all output so far is shown."""
        # Output buffered by C libraries is not yet in the pipe.
        ctypes.CDLL(None).fflush(None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._busy:
                if not self._waiting():
                    return
            time.sleep(0.001)

    def restore(self) -> None:
        """Restore the descriptor."""
        self.flush()
        os.dup2(self._before, STDOUT)  # closes the pipe's last writer, which ends the thread
        os.close(self._before)

    def _waiting(self) -> int:
        """Return the number of bytes written and not yet read."""
        size = fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(size, sys.byteorder)

    def _run(self) -> None:
        """Read and show output until the pipe's last writer is closed."""
        while True:
            ready = select.select([self._read], [], [], HELD_S if self._filter.pending else None)[0]
            with self._busy:
                if not ready:
                    self._show(self._filter.release())
                elif data := os.read(self._read, PIPE):
                    self._show(self._filter.feed(self._decoder.decode(data)))
                else:
                    os.close(self._read)
                    return

    def _show(self, text: str) -> None:
        if text:
            sys.stdout.write(text)


def start_capture() -> None:
    """Start to redirect file descriptor 1 to `sys.stdout`; no effect while redirected."""
    if not _now:
        _now.append(NativeOutput())


def flush_capture() -> None:
    """Wait until all output on file descriptor 1 is shown."""
    for each in _now:
        each.flush()


def stop_capture() -> None:
    """Restore file descriptor 1."""
    while _now:
        _now.pop().restore()


@dataclass(frozen=True)
class _LineState:
    """Parser state after part of some interleaved lines.

    Attributes:
        counts: Number of times each of `PIECES` was read.
        peers: Number of peers, equal in all lines; -1 before the first.
        rank: Highest rank; -1 before the first.
    """

    counts: tuple[int, ...] = (0,) * len(PIECES)
    peers: int = -1
    rank: int = -1

    @property
    def is_whole(self) -> bool:
        return len(set(self.counts)) == 1

    def takes(self, piece: int) -> bool:
        """Return whether an open line, or a new one, continues with this piece."""
        before = self.counts[piece - 1] if piece else _LINES
        return self.counts[piece] < before

    def after(self, piece: int) -> "_LineState":
        counts = (*self.counts[:piece], self.counts[piece] + 1, *self.counts[piece + 1 :])
        return replace(self, counts=counts)

    def numbered(self, piece: int, number: int) -> "_LineState | None":
        """Return the state after a number, or None for an impossible number."""
        if piece == PIECES.index(None):
            rank, peers = max(self.rank, number), self.peers
        else:
            rank, peers = self.rank, number
        # The ranks of n processes are 0 to n - 1, each has n - 1 peers, and all lines name the same number.
        if peers >= 0 and (peers < max(rank, 1) or self.peers not in (-1, peers)):
            return None
        return replace(self.after(piece), peers=peers, rank=rank)


class GlooFilter:
    r"""Filter that removes gloo's lines from text arriving in parts.

    >>> only = GlooFilter()
    >>> only.feed("a 7[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connec")
    'a 7'
    >>> only.feed("ted peer ranks is : 1\n5 b")
    '5 b'
    """

    def __init__(self) -> None:
        self.pending = ""  # possible beginning of a gloo line

    def feed(self, text: str) -> str:
        """Add the next part, and return all text now known not to belong to gloo's lines."""
        text, shown = self.pending + text, []
        while (start := text.find(RANK)) >= 0:
            end = _end_of_lines(text, start)
            if end is None:
                shown.append(text[:start])
                self.pending = text[start:]
                return "".join(shown)
            after = start + len(RANK) if end == start else start
            shown.append(text[:after])
            text = text[max(end, after) :]
        cut = len(text) - _open_prefix_length(text)
        self.pending = text[cut:]
        return "".join((*shown, text[:cut]))

    def release(self) -> str:
        """Return the pending text and stop waiting for the rest of a line."""
        text, self.pending = self.pending, ""
        return text


def _open_prefix_length(text: str) -> int:
    """Return the number of trailing characters that may begin a line of gloo's."""
    return next((n for n in range(min(len(text), len(RANK) - 1), 0, -1) if RANK.startswith(text[-n:])), 0)


def _end_of_lines(text: str, start: int) -> int | None:
    """Return the end of the interleaved lines that begin at `start`: `start` itself for other text, None where the text
    ends too early."""
    # A search over parser states: a piece may belong to any open line, and digits of two lines may be adjacent.
    todo, seen, ends_early = [(start, _LineState())], set[tuple[int, _LineState]](), False
    while todo:
        at, lines = todo.pop()
        if lines.is_whole and at > start:
            return at
        for after, rest in _next_states(text, at, lines):
            if after is None:
                ends_early = True
            elif (after, rest) not in seen:
                seen.add((after, rest))
                todo.append((after, rest))
    return None if ends_early else start


def _next_states(text: str, at: int, lines: _LineState) -> Iterator[tuple[int | None, _LineState]]:
    """Yield each way to read one more piece at `at`: its end (None where the text ends first) and the new state."""
    for i, piece in enumerate(PIECES):
        if not lines.takes(i):
            continue
        if piece is None:
            yield from _number_states(text, at, i, lines)
        elif text.startswith(piece, at):
            yield at + len(piece), lines.after(i)
        elif piece.startswith(text[at:]):
            yield None, lines


def _number_states(text: str, at: int, piece: int, lines: _LineState) -> Iterator[tuple[int | None, _LineState]]:
    """Yield each number that begins at `at`, of one digit and more: numbers of two lines may be adjacent."""
    for end in range(at + 1, at + _DIGITS + 1):
        digits = text[at:end]
        if len(digits) < end - at:  # more digits may arrive
            yield None, lines
            return
        if not (digits.isascii() and digits.isdecimal()) or (len(digits) > 1 and digits[0] == "0"):
            return
        if (after := lines.numbered(piece, int(digits))) is not None:
            yield end, after
