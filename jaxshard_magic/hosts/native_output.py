"""Capture output written to file descriptor 1 outside Python on a host, without gloo's lines.

ipykernel captures the descriptor too, but mixes such output with Python's, so that its lines can't be separated, and
cuts multi-byte characters in two.
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
from contextlib import suppress

from .gloo_lines import GlooFilter

STDOUT = 1
HELD_S = 1.0  # to wait for the rest of a gloo line
# Bytes buffered while Python runs something else: with Linux's default of 64 KiB a talkative library would block.
PIPE = 2**20
_now: "list[NativeOutput]" = []


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
