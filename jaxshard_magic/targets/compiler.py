"""Process that compiles for this one: started on first use, killed when the wait for an answer ends early."""

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

from ..compile_wait import TICK_S, tick
from ..errors import ShardError
from ..temporary import AcquiredLock, UndoUnlessFinished
from .worker import IDLE_S, CompileRequest, CompileResult, CompilerRefusal

LIMIT_S = 1800.0
# Imported, not run with -m: as `__main__`, the module's classes would be others than those that this process unpickles.
_START = "from jaxshard_magic.targets.worker import main; main()"
_CHATTER = re.compile(r"[IW]\d{4} |WARNING: All log messages|@ +0x|\*\*\* |=== |\S+\.cc:\d+$")
_FATAL = re.compile(r"F\d{4} |Fatal|terminate called|\w*(Error|Exception)\b")
_MOST = 300  # characters of a compiler's last words
_SMALLER = ". A step that scans over its layers is a smaller program; another slice or another --remat may do, too"
_ROOT = str(Path(__file__).resolve().parents[2])


# Returns whether the program that this thread waits for is no longer wanted; called during the wait.
given_up: ContextVar[Callable[[], bool]] = ContextVar("given_up", default=lambda: False)


class CompilerFailed(ShardError):
    """Error: the compiler's process ended without an answer, or was stopped at the time limit."""


class Compiler:
    """Process of its own with one kind of compiler.

    The process ends by itself when it has been idle for long; the next job starts a new one.

    Args:
        environment: Environment variables of the process, besides those of this one.
        idle_s: Seconds without a job until the process ends.
    """

    def __init__(self, environment: Mapping[str, str], idle_s: float = IDLE_S):
        self.environment = dict(environment)
        self.idle_s = idle_s
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lifeline: Any = None  # write end of a pipe; the process ends when it is closed
        self._log: Any = None
        self._asked: Mapping[str, Any] | CompileRequest | None = None  # job or topology without an answer yet
        self._lock = threading.RLock()

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def preload(self, topology: Mapping[str, Any]) -> None:
        """Start the process and have it load its compiler in the meantime.

        Args:
            topology: Arguments for `get_topology_desc`.
        """
        with AcquiredLock(self._lock):
            if not self._alive():
                with UndoUnlessFinished(self.stop) as work:
                    self._start()
                    self._send(dict(topology))
                    work.mark_finished()

    def compile(self, job: CompileRequest, limit_s: float = LIMIT_S) -> CompileResult | CompilerRefusal:
        """Compile a program.

        An interrupt ends the process for good, and so do `limit_s` seconds and a `given_up` that returns true.

        Returns:
            The compiled program, or the message of a compiler that refuses.

        Raises:
            CompilerFailed: The limit is reached, or the process ends by itself.
            ShardError: `given_up` returned true.
        """
        with AcquiredLock(self._lock):
            alive = self._alive()
            with UndoUnlessFinished(self.stop) as work:
                if not alive:
                    self._start()
                if self._asked is not None:  # by `preload`
                    self._answer(limit_s)
                self._send(job)
                answer = self._answer(limit_s)
                work.mark_finished()
                return answer

    def stop(self) -> None:
        """Kill the process, even at work."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the group: also processes that it started, such as ptxas
            process.wait()
        for file in (self._connection, self._lifeline, self._log):
            if file is not None and not file.closed:
                file.close()
        atexit.unregister(self.stop)
        self._process = self._asked = None

    def _alive(self) -> bool:
        """Return whether the process runs and has no unanswered job; stop a process that has one."""
        if self._process is None:
            return False
        if isinstance(self._asked, CompileRequest) or self._process.poll() is not None:
            self.stop()  # its late answer would be taken for the answer to the next job
        return self._process is not None

    def _start(self) -> None:
        """Start the process with a pipe for jobs, and a second one that tells it when this process ends."""
        self.stop()  # closes what an interrupted start left open
        self._connection, theirs = Pipe()
        read, lifeline = os.pipe()
        self._lifeline = os.fdopen(lifeline, "wb")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        paths = os.pathsep.join(p for p in (_ROOT, os.environ.get("PYTHONPATH")) if p)
        # An attached accelerator belongs to this process: JAX in the other one starts on the CPU.
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
                start_new_session=True,  # otherwise Ctrl-C in a terminal reaches this process as well
            )
        atexit.register(self.stop)

    def _send(self, what: Any) -> None:
        """Send a job or a topology. Raises ShardError if the process has ended."""
        assert self._connection is not None
        self._asked = what
        try:
            self._connection.send(what)
        except OSError as error:
            raise self._ended() from error

    def _answer(self, limit_s: float) -> Any:
        """Wait for the answer. Raises ShardError at the limit, when given up, and if the process ends."""
        assert self._connection is not None
        until = time.monotonic() + limit_s
        try:
            while not self._connection.poll(TICK_S):  # short waits: interrupts are handled in between
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
        """Return the error for a process that has ended."""
        if self._process is None:
            return ShardError("the compiler was stopped before it had finished")
        self._log.seek(0)
        last = _last_words(self._log.read().decode(errors="replace"))
        said, code = f"; its last words: {last}" if last else "", self._process.wait()
        smaller = _SMALLER if code < 0 else ""  # negative: killed by a signal, while it compiled
        return CompilerFailed(f"the compiler's process ended {_describe_exit(code)}{said}{smaller}")


def _last_words(log: str) -> str:
    r"""Return the line of a log with the failure: the last fatal line, else the last one that is no chatter or stack
    frame.

    >>> _last_words("W0101 slow\nF0101 pass.cc:7] Check failed: n < 8\n*** Check failure stack trace: ***\n  @ 0x7f")
    'F0101 pass.cc:7] Check failed: n < 8'
    """
    lines = [line.strip() for line in log.splitlines()]
    lines = [line for line in lines if line and not _CHATTER.match(line)]
    fatal = [line for line in lines if _FATAL.match(line)]
    return (fatal or lines or [""])[-1][:_MOST]


def _describe_exit(code: int) -> str:
    """Describe the end of a process by its exit code. The system does not tell who sent a signal, nor why.

    >>> _describe_exit(1), _describe_exit(-15), _describe_exit(-60)
    ('with exit code 1', 'by signal 15 (SIGTERM)', 'by signal 60')
    """
    if code >= 0:
        return f"with exit code {code}"
    names = {each.value: f" ({each.name})" for each in signal.Signals}
    killed = ", as Linux does where a machine or a container has no memory left" if code == -signal.SIGKILL else ""
    return f"by signal {-code}{names.get(-code, '')}{killed}"
