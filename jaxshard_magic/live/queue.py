"""Calls of a step that the device may not have finished, read without waiting for the device."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from ..temporary import AcquiredLock
from .rates import CallSequence, WorkDone

MAX_CALLS = 256  # unread calls kept: their values take memory on the device
READ_TIME_SHARE = 0.004  # share of the time for reads: a read holds the GIL, which the loop needs
MAX_READ_SECONDS = 0.02  # seconds of one read, at most, after a long enough pause
# First calls of a run, read at any cost: the time of a process's first read says nothing about later ones.
ALWAYS_READ = 64

# One call: its number, its sequence of calls, the output to poll for its end (None: it has finished), and its values in
# the order of the sequence's names. A bare tuple, as each call of a step makes one.
Call = tuple[int, CallSequence, Any, Sequence[Any]]
OnValues = Callable[[int, dict[str, float]], None]


class PendingCalls:
    """Unfinished calls, oldest first, with a bounded reader of the finished ones.

    At most `max_calls` calls are held; above that, every second call is left unread. Reading takes at most
    `READ_TIME_SHARE` of the time, and `MAX_READ_SECONDS` at once; time spent in the callback counts. If calls finish
    faster, the newest call and evenly spaced earlier ones are read. While at most `ALWAYS_READ` calls have
    finished, all are read regardless of time, and later all calls around the first value of a name that is not finite.

    Args:
        is_done: Returns whether the device has computed an output.
        max_calls: Maximum number of calls held.

    Attributes:
        done: Total work of the finished calls.
        skipped: Number of calls left unread.
    """

    def __init__(self, is_done: Callable[[Any], bool], max_calls: int = MAX_CALLS):
        self._calls: deque[Call] = deque()
        self._is_done, self._most = is_done, max_calls
        self._lock = threading.RLock()
        self._cost = 0.0  # seconds for each call of the last read
        self._last_read = time.perf_counter()
        self._read_budget = MAX_READ_SECONDS  # seconds that a read may take now
        self._nonfinite_names: set[str] = set()  # names that had a value that is not finite
        self.done = WorkDone()
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        """Add a call, from the single thread that makes calls."""
        calls = self._calls
        calls.append(call)
        if len(calls) > self._most:
            self._drop_every_second()

    @property
    def is_idle(self) -> bool:
        """True if all calls have finished."""
        with AcquiredLock(self._lock):
            return not self._calls or self._is_finished(self._calls[-1])

    def read_finished(self, on_values: OnValues, *, read_all: bool = False) -> None:
        """Read calls finished since the last time, in order, as far as the time limit allows.

        Args:
            on_values: Called with the number and the values of each call read.
            read_all: Read all finished calls, without a time limit.
        """
        with AcquiredLock(self._lock):
            # CPU time of this thread: while it waits for the GIL, it does not hold up the loop.
            now, start = time.perf_counter(), time.thread_time()
            ready: list[Call] = []
            while self._calls and self._is_finished(self._calls[0]):
                ready.append(self._calls.popleft())
            if not ready:
                return
            number, stretch, *_ = ready[-1]
            self.done = stretch.done_after(number)
            self._read_budget = min(MAX_READ_SECONDS, self._read_budget + READ_TIME_SHARE * (now - self._last_read))
            is_early = number <= ALWAYS_READ
            chosen = range(len(ready)) if read_all or is_early else self._choose(len(ready))
            for at, values in sorted(self._read_values(ready, set(chosen)).items()):
                on_values(ready[at][0], values)
            seconds = time.thread_time() - start
            self._last_read, self._cost, self._read_budget = (
                now,
                seconds / len(chosen),
                max(0.0, self._read_budget - seconds),
            )

    def _is_finished(self, call: Call) -> bool:
        return call[2] is None or self._is_done(call[2])

    def _drop_every_second(self) -> None:
        """Leave every second call unread, the oldest first."""
        with AcquiredLock(self._lock):
            calls = self._calls
            held = len(calls)
            # In place, by one rotation of the deque: another thread may read it.
            for i in range(held):
                call = calls.popleft()
                if i % 2:
                    calls.append(call)
            self.skipped += held - len(calls)

    def _choose(self, count: int) -> Sequence[int]:
        """Return the positions of the calls to read: every nth up to the last, as many as the time limit allows."""
        affordable = max(1, int(self._read_budget / self._cost)) if self._cost else count
        return range(count - 1, -1, -max(1, -(-count // affordable)))

    def _read_values(self, ready: Sequence[Call], chosen: set[int]) -> dict[int, dict[str, float]]:
        """Return the values of the chosen calls by position among the finished ones."""
        values: dict[int, dict[str, float]] = {}
        for i in sorted(chosen):
            values[i] = call_values(ready[i])
            new = {name for name, value in values[i].items() if not isfinite(value)} - self._nonfinite_names
            # An unread call before this one may be the first whose value is not finite.
            if new:
                self._nonfinite_names |= new
                before = max((j for j in values if j < i), default=-1)
                values |= {j: call_values(ready[j]) for j in range(before + 1, i)}
        self.skipped += len(ready) - len(values)
        return values


def call_values(call: Call) -> dict[str, float]:
    """Return the values of a finished call, without unreadable ones."""
    _, stretch, _, arrays = call
    read = ((name, scalar_value(array)) for name, array in zip(stretch.value_names, arrays, strict=True))
    return {name: value for name, value in read if value is not None}


def scalar_value(array: Any) -> float | None:
    """Return an array as a number, the last element of several; never wait.

    None for an array that is not ready, was deleted, belongs to a failed call, or is on other hosts.
    """
    try:
        if not array.is_ready():
            return None
        if array.sharding.num_devices > 1:
            if array.is_fully_replicated:
                array = array.addressable_data(0)
            elif not array.is_fully_addressable:
                return None
        read = np.asarray(array)
        return float(read if read.ndim == 0 else read.reshape(-1)[-1])
    except (RuntimeError, IndexError):  # deleted, without a shard on this host, or of a failed call
        return None
