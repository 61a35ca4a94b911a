"""The compiling process of this one: started when it is first needed, stopped when the wait for it ends."""

import atexit
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import ShardError
from ..meanwhile import TICK_S, tick
from ..temporary import Held, Unfinished
from .built import Built
from .worker import IDLE_S, Failed, Job

LIMIT_S = 1800.0
_START = "from jaxshard_magic.targets.worker import main; main()"  # as __main__, its classes would be others than ours
_CHATTER = re.compile(r"[IW]\d{4} |WARNING: All log messages|@ +0x|\*\*\* |=== |\S+\.cc:\d+$")
_FATAL = re.compile(r"F\d{4} |Fatal|terminate called|\w*(Error|Exception)\b")
_MOST = 300  # characters of a compiler's last words
_SMALLER = (
    ". A step that scans over its layers is a smaller program; another slice or another --remat may do, too"
)
_ROOT = str(Path(__file__).resolve().parents[2])


# Whether what this thread has compiled is no longer wanted; looked at while it waits.
given_up: ContextVar[Callable[[], bool]] = ContextVar("given_up", default=lambda: False)


class CompilerFailed(ShardError):
    """The compiler's process came to an end without an answer, or had to be stopped at its limit."""


class Compiler:
    """A process of its own with one kind of compiler, under `environment`.

    It is idle most of the time, and ends by itself after `idle_s` seconds of that; then the next job starts another
    one.
    """

    def __init__(self, environment: Mapping[str, str], idle_s: float = IDLE_S):
        self.environment = dict(environment)
        self.idle_s = idle_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline: Any = None  # a file; the process ends when it is closed
        self._log: Any = None
        self._asked: Mapping[str, Any] | Job | None = None  # what it still has to answer
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """The process's id; None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def ready(self, topology: Mapping[str, Any]) -> None:
        """Start the process and let it load its compiler meanwhile."""
        with Held(self._lock):
            if not self._alive():
                with Unfinished(self.stop) as work:
                    self._start()
                    self._send(dict(topology))
                    work.finished()

    def compile(self, job: Job, limit_s: float = LIMIT_S) -> Built | Failed:
        """What the compiler says of a program. An interrupt, or `limit_s` seconds, end the process for good; so it is
        once `given_up` says that nobody wants the answer.

        Raises `CompilerFailed` at the limit and where the process ends by itself, `ShardError` where it is given up.
        """
        with Held(self._lock):
            alive = self._alive()
            with Unfinished(self.stop) as work:
                if not alive:
                    self._start()
                if self._asked is not None:  # whether it is ready
                    self._answer(limit_s)
                self._send(job)
                answer = self._answer(limit_s)
                work.finished()
                return answer

    def stop(self) -> None:
        """End the process now, whatever it does."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has started, as ptxas, with it
            process.wait()
        for file in (self._connection, self._lifeline, self._log):
            if file is not None and not file.closed:
                file.close()
        atexit.unregister(self.stop)
        self._process = self._asked = None

    def _alive(self) -> bool:
        if self._process is None:
            return False
        if isinstance(self._asked, Job) or self._process.poll() is not None:
            self.stop()  # what nobody waited for would be taken for the answer to the next job
        return self._process is not None

    def _start(self) -> None:
        self.stop()  # what an interrupt has left of one that was not started
        self._connection, theirs = Pipe()
        read, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        paths = os.pathsep.join(p for p in (_ROOT, os.environ.get("PYTHONPATH")) if p)
        environment = {**os.environ, **self.environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        with theirs, os.fdopen(read, "rb"):
            given = theirs.fileno(), read, self.idle_s
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *map(str, given)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(theirs.fileno(), read),
                start_new_session=True,  # Ctrl-C in a terminal is for the process that waits
            )
        atexit.register(self.stop)

    def _send(self, what: Any) -> None:
        assert self._connection is not None
        self._asked = what
        try:
            self._connection.send(what)
        except OSError as error:
            raise self._ended() from error

    def _answer(self, limit_s: float) -> Any:
        assert self._connection is not None
        until = time.monotonic() + limit_s
        try:
            while not self._connection.poll(TICK_S):  # between which an interrupt is heard
                tick()
                if given_up.get()():
                    raise ShardError("the compiler was stopped: nobody waits for its answer any more")
                if time.monotonic() > until:
                    raise CompilerFailed(
                        f"the compiler has not finished within {limit_s:g} s and was stopped. A step that scans over "
                        "its layers compiles faster; %config ShardSession.compile_limit = SECONDS allows more"
                    )
            answer = self._connection.recv()
            self._asked = None
            return answer
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> ShardError:
        if self._process is None:
            return ShardError("the compiler was stopped before it had finished")
        self._log.seek(0)
        last = _last_words(self._log.read().decode(errors="replace"))
        said, code = f"; its last words: {last}" if last else "", self._process.wait()
        smaller = _SMALLER if code < 0 else ""  # by a signal, at work
        return CompilerFailed(f"the compiler's process ended {_way_of(code)}{said}{smaller}")


def _last_words(log: str) -> str:
    r"""The line of a log that says what went wrong: the last fatal one, else the last that is no chatter nor a frame.

    >>> _last_words("W0101 slow\nF0101 pass.cc:7] Check failed: n < 8\n*** Check failure stack trace: ***\n  @ 0x7f")
    'F0101 pass.cc:7] Check failed: n < 8'
    """
    lines = [line.strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not _CHATTER.match(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    return (fatal or lines or [""])[-1][:_MOST]


def _way_of(code: int) -> str:
    """How a process came to its end, by its exit code; who sent a signal, and why, is told to nobody.

    >>> _way_of(1), _way_of(-15), _way_of(-60)
    ('with exit code 1', 'by signal 15 (SIGTERM)', 'by signal 60')
    """
    if code >= 0:
        return f"with exit code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    killed = (
        ", as Linux does where a machine or a container has no memory left" if code == -signal.SIGKILL else ""
    )
    return f"by signal {-code}{names.get(-code, '')}{killed}"
