"""Capture of XLA's complaints while it compiles, from file descriptor 2.

XLA's log goes to the descriptor, past `sys.stderr`. During a capture descriptor 2 is a file. Messages of libtpu about a
missing TPU are dropped. Everything else that is no known complaint is forwarded in order, within a fraction of a
second, so that a progress line in a terminal keeps moving.

Footguns: the last words of a process that aborts are lost, and so is output that a child process, started during a
capture, writes after its end.
"""

import os
import re
import select
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from .temporary import AcquiredLock, TemporaryChange, run_uninterrupted

TICK = 0.1  # seconds between checks of the file's size

# XLA ends each message with a line feed, but some messages have several lines, and a long one is cut anywhere. So later
# lines belong to a message only if they match its known text.
_COMPLAINT = re.compile(
    rb"""(?:[IWEF]\d{4}\ [\d:.]+\ +\d+ | \d{4}-\d\d-\d\d\ [\d:.]+:\ [IWEF]) \ [^\s:]+:\d+\]\ ?  # when and where
    (?P<text>
        \[(?:SPMD|spmd)\]\ Involuntary\ full\ rematerialization [^\n]*\n
      | Can't\ reduce\ memory\ use\ below [^\n]*\n
      | (?:(?:\[[^\n]*\]\ )? The\ operation\ took [^\n]*\n)?
        (?: Constant\ folding\ an\ instruction [^\n]*\n
            (?: \n\ \ [^\n]*\n (?: \nThis\ isn't [^\n]*\n (?: \nIf\ you'd [^\n]*\n )? )? )?
          | \n \*{8,}\n [^\n]* [Ss]low\ compile\? [^\n]*\n (?: \*{8,}\n )?
        )
    )""",
    re.VERBOSE,
)


_PREAMBLE = rb"WARNING: Logging before InitGoogle\(\) is written to STDERR\n"
_NO_HOST = rb"[EW]\d{4} [\d:.]+ +\d+ [^\s:]+:\d+\] [^\n]*'WARNING: could not determine TPU [^\n]*\n"
_TRACE = rb"=== Source Location Trace: === *\n(?:[^\s:]+:\d+ *\n)*"
_NO_TPU = re.compile(
    rb"Failed to find host bounds for accelerator type: WARNING: could not determine TPU [^\n]*\n"
    rb"|(?:%s)?%s(?:%s\n?)?" % (_PREAMBLE, _NO_HOST, _TRACE)
)
# Such a message at the end of the output, where more of it may follow.
_NO_TPU_BEGUN = re.compile(rb"(?:%s\Z|(?:%s)?%s(?:%s)?\Z)" % (_PREAMBLE, _PREAMBLE, _NO_HOST, _TRACE))


class Capture(TemporaryChange):
    """Capture of compiler messages.

    Attributes:
        messages: Complaints written during the capture, in full, without the log's date and source line.
    """

    def __init__(self) -> None:
        self.messages: tuple[str, ...] = ()

    def apply(self) -> None:
        _join(self)

    def revert(self) -> None:
        _leave(self)


def capture_messages() -> Capture:
    """Return a context that captures compiler messages written to descriptor 2.

    Captures may be nested, and open in several threads: each gets all messages of its time, whatever program caused
    them. Nothing is captured where descriptor 2 is closed, or a file can't be created.

    >>> with capture_messages() as log:
    ...     pass  # lowered.compile()
    >>> log.messages
    ()
    """
    return Capture()


class _Redirect(TemporaryChange):
    """Redirection of descriptor 2 to a file, with a thread that forwards other output. Guarded by `_lock`."""

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self._meant: Any = None  # file object on a duplicate of the original descriptor 2
        self._file: Any = None  # file that descriptor 2 writes to during a capture
        self._passed = 0  # bytes of that file already sorted
        self.turned = False
        self._ended = threading.Event()

    def apply(self) -> None:
        """Redirect. Raises OSError or RuntimeError where no file or thread can be created."""
        if self.turned:
            return
        _flush()
        if self._file is None:
            self._meant, self._file = run_uninterrupted(_opened)
        threading.Thread(target=self._watch, name="jaxshard compiler log", daemon=True).start()
        # Set before the change, so that `revert` undoes it after an interrupt between these two lines.
        self.turned = True
        os.dup2(self._file.fileno(), 2)

    def revert(self) -> None:
        if self.turned:
            _flush()
            os.dup2(self._meant.fileno(), 2)
            self.pass_on(self._size(), last=True)
            self.turned = False
        self._ended.set()
        for file in (self._file, self._meant):
            if file is not None:
                file.close()

    def pass_on(self, end: int | None = None, last: bool = False) -> None:
        """Sort output up to byte `end`: complaints go to the captures, all else is forwarded.

        Args:
            end: None for all finished lines.
            last: Whether the output is complete, so that the beginning of a message is forwarded, too.
        """
        text = os.pread(self._file.fileno(), (self._size() if end is None else end) - self._passed, self._passed)
        if end is None:
            # Another thread may be in the middle of a line.
            text = text[: text.rfind(b"\n") + 1]
        if not last and (begun := _NO_TPU_BEGUN.search(text)):
            # The rest of the message has yet to be written.
            text = text[: begun.start()]
        self._passed += len(text)
        found = tuple(m["text"].decode(errors="replace").strip() for m in _COMPLAINT.finditer(text))
        for capture in self.captures:
            capture.messages += found
        _write(self._meant.fileno(), _NO_TPU.sub(b"", _COMPLAINT.sub(b"", text)))

    def _watch(self) -> None:
        before = 0
        while not self._ended.wait(TICK):
            with AcquiredLock(_lock):
                if self._ended.is_set():
                    return
                size = self._size()
                # Unchanged since the last check, so that no message is half written.
                if size == before:
                    self.pass_on(size)
                before = size

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


_lock = threading.RLock()
_redirect: _Redirect | None = None


def _join(capture: Capture) -> None:
    global _redirect
    # Windows has no `pread`.
    if not hasattr(os, "pread"):
        return
    with AcquiredLock(_lock):
        if _redirect is not None and _redirect.turned:
            _redirect.pass_on()
        else:
            # Left behind by an interrupt.
            if _redirect is not None:
                _redirect.revert()
            _redirect = _Redirect()
        _redirect.captures.append(capture)
        try:
            _redirect.apply()
        except (OSError, RuntimeError):
            _redirect.revert()
            _redirect = None


def _leave(capture: Capture) -> None:
    global _redirect
    with AcquiredLock(_lock):
        if _redirect is None:
            return
        if any(each is not capture for each in _redirect.captures):
            _redirect.pass_on()
            _redirect.captures = [each for each in _redirect.captures if each is not capture]
            return
        _redirect.revert()
        _redirect = None


def _opened() -> tuple[Any, Any]:
    """Return a duplicate of descriptor 2, and a file to replace it."""
    # A file and no pipe: a pipe fills up, and the writer then waits for a reader. Callers run this line uninterrupted,
    # as an interrupt between the creation of a descriptor and of the object that closes it would leak the descriptor.
    return os.fdopen(os.dup(2), "wb", buffering=0), tempfile.TemporaryFile(buffering=0)


def _flush() -> None:
    """Write out Python's buffers for descriptor 2, to keep the order of output."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is not None:
            # The stream may be closed, or have no reader.
            with suppress(OSError, ValueError):
                stream.flush()


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data` to a descriptor that may be full for a while. A descriptor without a reader drops it."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [])
