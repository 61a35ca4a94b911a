"""What calls of a step gave, until the device has done them: looked at without ever waiting for it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .rates import Done

MOST = 256  # calls whose numbers are held: on an accelerator each takes some memory
SHARE = 0.004  # of the time that reading may take: a read holds the interpreter, which the loop needs
BURST = 0.02  # seconds that it may take at once, after as long a pause: a short loop is read whole


class Call(NamedTuple):
    """One call: its number, what all calls so far did, the output that tells whether it has finished (None: it has),
    and its numbers by name."""

    number: int
    done: Done
    sign: Any
    names: Sequence[str]
    arrays: Sequence[Any]


class Finished(NamedTuple):
    """A call that has finished, and the numbers that could be read of it; empty where it was passed over."""

    number: int
    done: Done
    values: dict[str, float]


class Queue:
    """Calls that are under way, oldest first, and the reading of those that are done. `is_done(sign)` tells which.

    At most `most` are held: where more are under way every second one goes unread. Reading takes at most `SHARE` of the
    time, and `BURST` ahead of it; where calls finish faster than that, the newest are read and others evenly before
    them, and all of those around the first number that is not finite.
    """

    def __init__(self, is_done: Callable[[Any], bool], most: int = MOST):
        self._calls: deque[Call] = deque()
        self._is_done, self._most = is_done, most
        self._lock = threading.Lock()
        self._cost = 0.0  # seconds that reading a call took, lately
        self._looked = time.perf_counter()
        self._saved = BURST  # seconds that reading may take now
        self._astray: set[str] = set()  # names that were not finite once
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        """A call has been made."""
        with self._lock:
            if len(self._calls) >= self._most:
                self.skipped += len(self._calls) // 2
                self._calls = deque(list(self._calls)[1::2])
            self._calls.append(call)

    @property
    def idle(self) -> bool:
        """Whether all calls that were made have finished."""
        with self._lock:
            return not self._calls or _done(self._calls[-1], self._is_done)

    def take(self, *, everything: bool = False) -> list[Finished]:
        """The calls that have finished since the last time, in order; their numbers as far as time allows, or of
        `everything`."""
        with self._lock:
            ready: list[Call] = []
            while self._calls and _done(self._calls[0], self._is_done):
                ready.append(self._calls.popleft())
            if not ready:
                return []
            now, start = time.perf_counter(), time.thread_time()
            self._saved = min(BURST, self._saved + SHARE * (now - self._looked))
            chosen = range(len(ready)) if everything else self._chosen(len(ready))
            found = self._read(ready, set(chosen))
            took = time.thread_time() - start
            self._looked, self._cost, self._saved = now, took / len(chosen), max(0.0, self._saved - took)
            return found

    def _chosen(self, count: int) -> Sequence[int]:
        """Which of so many calls are read: every nth up to the last, as many as what was saved pays for."""
        affordable = max(1, int(self._saved / self._cost)) if self._cost else count
        return range(count - 1, -1, -max(1, -(-count // affordable)))

    def _read(self, ready: Sequence[Call], chosen: set[int]) -> list[Finished]:
        values: dict[int, dict[str, float]] = {}
        for i in sorted(chosen):
            values[i] = numbers(ready[i])
            new = {name for name, value in values[i].items() if not np.isfinite(value)} - self._astray
            if new:  # those between it and the last one that was read may have been the first
                self._astray |= new
                before = max((j for j in values if j < i), default=-1)
                values |= {j: numbers(ready[j]) for j in range(before + 1, i)}
        self.skipped += len(ready) - len(values)
        return [Finished(call.number, call.done, values.get(i, {})) for i, call in enumerate(ready)]


def _done(call: Call, is_done: Callable[[Any], bool]) -> bool:
    return call.sign is None or is_done(call.sign)


def numbers(call: Call) -> dict[str, float]:
    """The numbers of a call that has finished, without those that can't be read."""
    read = ((name, number(array)) for name, array in zip(call.names, call.arrays, strict=True))
    return {name: value for name, value in read if value is not None}


def number(array: Any) -> float | None:
    """The value of an array, the last of several; None where it is not ready, was deleted, is of a call that failed, or
    lies on other hosts. Nothing is waited for."""
    try:
        if array.is_deleted() or not array.is_ready():
            return None
        if array.is_fully_replicated:
            array = array.addressable_data(0)
        elif not array.is_fully_addressable:
            return None
        return float(np.asarray(array).reshape(-1)[-1])
    except (RuntimeError, IndexError):  # deleted since, no part of it here, or the call failed
        return None
