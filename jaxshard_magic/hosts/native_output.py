"""What a host's process writes on file descriptor 1 and not through Python, shown without gloo's lines.

ipykernel shows it as well, but mixed with what cells print, from where no line can be told apart any more; and it cuts
characters of several bytes in two.
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
HELD_S = 1.0  # how long the rest of one of gloo's lines is waited for
PIPE = (
    2**20
)  # bytes that are taken while Python runs something else; Linux's own 64 KiB stop a talkative library
_now: "list[NativeOutput]" = []


class NativeOutput:
    """File descriptor 1 led to `sys.stdout`, from `taken()` until `give_back()`."""

    def __init__(self) -> None:
        self._before = os.dup(STDOUT)
        self._read, write = os.pipe()
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE)
        os.dup2(write, STDOUT)
        os.close(write)
        self._filter, self._decoder = GlooFilter(), codecs.getincrementaldecoder("utf-8")("replace")
        self._busy = threading.Lock()  # while something is read and shown
        threading.Thread(target=self._run, name="jaxshard output", daemon=True).start()

    def settle(self, seconds: float = 2.0) -> None:
        """Wait until what was written so far is shown."""
        ctypes.CDLL(None).fflush(None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with self._busy:
                if not self._waiting():
                    return
            time.sleep(0.001)

    def give_back(self) -> None:
        """Let the descriptor be what it was."""
        self.settle()
        os.dup2(self._before, STDOUT)  # the last end of the pipe to be written to: the thread ends
        os.close(self._before)

    def _waiting(self) -> int:
        """Bytes that were written and not read."""
        size = fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4)
        return int.from_bytes(size, sys.byteorder)

    def _run(self) -> None:
        while True:
            ready = select.select([self._read], [], [], HELD_S if self._filter.held else None)[0]
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


def take() -> None:
    """Lead file descriptor 1 to `sys.stdout` from here on."""
    if not _now:
        _now.append(NativeOutput())


def settle() -> None:
    """Wait until what was written there is shown."""
    for each in _now:
        each.settle()


def give_back() -> None:
    """Let the descriptor be what it was."""
    while _now:
        _now.pop().give_back()
