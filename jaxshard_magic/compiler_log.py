"""What XLA complains of while it compiles: its log goes to file descriptor 2, past Python, and is taken from there.

While a capture is open, descriptor 2 is a file. What libtpu says of a TPU that is not there is dropped, as nobody asked
for one; whatever else is no known complaint goes on to where it was meant for,
in order and within a fraction of a second: a progress line in a terminal keeps moving. Two things are out of reach: the
last words of a process that aborts, and what a child that was started meanwhile writes once the capture has ended.
"""

import os
import re
import select
import sys
import tempfile
import threading
from contextlib import suppress
from typing import Any

from .temporary import Held, Temporary, done_whole

TICK = 0.1  # seconds between looks at the file

# XLA ends each message with a line feed, but some have several lines and a long one is cut anywhere: what follows the
# first line belongs to the message only where it reads like it.
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
_NO_TPU_BEGUN = re.compile(rb"(?:%s\Z|(?:%s)?%s(?:%s)?\Z)" % (_PREAMBLE, _PREAMBLE, _NO_HOST, _TRACE))


class Capture(Temporary):
    """`messages`: each complaint written while the capture was open, whole, without the log's date and place."""

    def __init__(self) -> None:
        self.messages: tuple[str, ...] = ()

    def begin(self) -> None:
        _join(self)

    def end(self) -> None:
        _leave(self)


def captured() -> Capture:
    """While the body runs, take what the compiler complains of off descriptor 2.

    Captures may be nested, and open in several threads: each gets all that is written while it is open, whichever
    program caused it. Where descriptor 2 is closed, or there is no room for a file, nothing is captured.

    >>> with captured() as log:
    ...     pass  # lowered.compile()
    >>> log.messages
    ()
    """
    return Capture()


class _Redirect(Temporary):
    """Descriptor 2 turned into a file, with a thread that passes on what arrives there. `_lock` guards it."""

    def __init__(self) -> None:
        self.captures: list[Capture] = []
        self._meant: Any = None  # a file on what descriptor 2 was
        self._file: Any = None  # what it is meanwhile
        self._passed = 0  # bytes of that
        self.turned = False
        self._ended = threading.Event()

    def begin(self) -> None:
        """Raises OSError or RuntimeError where file or thread can't be had."""
        if self.turned:
            return
        _flush()
        if self._file is None:
            self._meant, self._file = done_whole(_opened)
        threading.Thread(target=self._watch, name="jaxshard compiler log", daemon=True).start()
        self.turned = True
        os.dup2(self._file.fileno(), 2)

    def end(self) -> None:
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
        """Sort what was written up to byte `end`: the complaints are the captures', the rest goes on.

        Without `end` it is all but a last line that is not finished: another thread may be in the middle of it.
        """
        text = os.pread(
            self._file.fileno(), (self._size() if end is None else end) - self._passed, self._passed
        )
        if end is None:
            text = text[: text.rfind(b"\n") + 1]
        if not last and (begun := _NO_TPU_BEGUN.search(text)):
            text = text[: begun.start()]  # its trace is still to come
        self._passed += len(text)
        found = tuple(m["text"].decode(errors="replace").strip() for m in _COMPLAINT.finditer(text))
        for capture in self.captures:
            capture.messages += found
        _write(self._meant.fileno(), _NO_TPU.sub(b"", _COMPLAINT.sub(b"", text)))

    def _watch(self) -> None:
        before = 0
        while not self._ended.wait(TICK):
            with Held(_lock):
                if self._ended.is_set():
                    return
                size = self._size()
                if size == before:  # still, so that no message is half there
                    self.pass_on(size)
                before = size

    def _size(self) -> int:
        return os.fstat(self._file.fileno()).st_size


_lock = threading.RLock()
_redirect: _Redirect | None = None


def _join(capture: Capture) -> None:
    global _redirect
    if not hasattr(os, "pread"):
        return
    with Held(_lock):
        if _redirect is not None and _redirect.turned:
            _redirect.pass_on()
        else:
            if _redirect is not None:  # an interrupt has left it
                _redirect.end()
            _redirect = _Redirect()
        _redirect.captures.append(capture)
        try:
            _redirect.begin()
        except (OSError, RuntimeError):
            _redirect.end()
            _redirect = None


def _leave(capture: Capture) -> None:
    global _redirect
    with Held(_lock):
        if _redirect is None:
            return
        if any(each is not capture for each in _redirect.captures):
            _redirect.pass_on()
            _redirect.captures = [each for each in _redirect.captures if each is not capture]
            return
        _redirect.end()
        _redirect = None


def _opened() -> tuple[Any, Any]:
    """What descriptor 2 is, and a file for it to be meanwhile: no pipe, which fills up, so that nobody waits for a
    reader. An interrupt between a descriptor and the object that closes it would leave the descriptor."""
    return os.fdopen(os.dup(2), "wb", buffering=0), tempfile.TemporaryFile(buffering=0)


def _flush() -> None:
    """What Python has buffered for descriptor 2 goes there in its turn."""
    for stream in (sys.stderr, sys.__stderr__):
        if stream is not None:
            with suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()


def _write(descriptor: int, data: bytes) -> None:
    """All of `data`, to a descriptor that may be full for a while; nobody misses it where nobody reads."""
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                select.select([], [descriptor], [])
