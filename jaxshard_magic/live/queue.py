"""What calls of a step gave, until the device has done them: looked at without ever waiting for it."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from ..temporary import Held
from .rates import Done, Stretch

MOST = 256  # calls whose numbers are held: on an accelerator each takes some memory
SHARE = 0.004  # of the time that reading may take: a read holds the interpreter, which the loop needs
BURST = 0.02  # seconds that it may take at once, after as long a pause
WHOLE = 64  # calls of a run that are read whatever that takes: the first read of a process is no measure of the others

# One call, as a bare tuple since each call of a step makes one: its number, the stretch that it is of, the output that
# tells whether it has finished (None: it has), and its numbers in the order of the stretch's names.
Call = tuple[int, Stretch, Any, Sequence[Any]]
Give = Callable[[int, dict[str, float]], None]


class Queue:
    """Calls that are under way, oldest first, and the reading of those that are done. `is_done(sign)` tells which.

    At most `most` are held: where more are under way every second one goes unread. Reading, with what is done with the
    numbers, takes at most `SHARE` of the time, and `BURST` ahead of it; where calls finish faster than that, the newest
    are read and others evenly before them, the first `WHOLE` of all, and all of those around the first number that is
    not finite. `done` is what
    the calls that have finished did together, `skipped` how many of them went unread.
    """

    def __init__(self, is_done: Callable[[Any], bool], most: int = MOST):
        self._calls: deque[Call] = deque()
        self._is_done, self._most = is_done, most
        self._lock = threading.RLock()
        self._cost = 0.0  # seconds that reading a call took, lately
        self._looked = time.perf_counter()
        self._saved = BURST  # seconds that reading may take now
        self._astray: set[str] = set()  # names that were not finite once
        self.done = Done()
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._calls)

    def put(self, call: Call) -> None:
        """A call has been made, by the one thread that makes them."""
        calls = self._calls
        calls.append(call)
        if len(calls) > self._most:
            self._thin()

    @property
    def idle(self) -> bool:
        """Whether all calls that were made have finished."""
        with Held(self._lock):
            return not self._calls or self._done(self._calls[-1])

    def take(self, give: Give, *, everything: bool = False) -> None:
        """Give `give(number, values)` the calls that have finished since the last time, in order, as far as time allows
        or of `everything`. What it takes itself counts as time of reading."""
        with Held(self._lock):
            now, start = time.perf_counter(), time.thread_time()
            ready: list[Call] = []
            while self._calls and self._done(self._calls[0]):
                ready.append(self._calls.popleft())
            if not ready:
                return
            number, stretch, *_ = ready[-1]
            self.done = stretch.done(number)
            self._saved = min(BURST, self._saved + SHARE * (now - self._looked))
            few = number <= WHOLE
            chosen = range(len(ready)) if everything or few else self._chosen(len(ready))
            for at, values in sorted(self._read(ready, set(chosen)).items()):
                give(ready[at][0], values)
            took = time.thread_time() - start
            self._looked, self._cost, self._saved = now, took / len(chosen), max(0.0, self._saved - took)

    def _done(self, call: Call) -> bool:
        return call[2] is None or self._is_done(call[2])

    def _thin(self) -> None:
        """Let every second call go unread, the oldest first, in place: another thread may be looking."""
        with Held(self._lock):
            calls = self._calls
            held = len(calls)
            for i in range(held):
                call = calls.popleft()
                if i % 2:
                    calls.append(call)
            self.skipped += held - len(calls)

    def _chosen(self, count: int) -> Sequence[int]:
        """Which of so many calls are read: every nth up to the last, as many as what was saved pays for."""
        affordable = max(1, int(self._saved / self._cost)) if self._cost else count
        return range(count - 1, -1, -max(1, -(-count // affordable)))

    def _read(self, ready: Sequence[Call], chosen: set[int]) -> dict[int, dict[str, float]]:
        """The numbers of the chosen calls, by their places among those that are ready."""
        values: dict[int, dict[str, float]] = {}
        for i in sorted(chosen):
            values[i] = numbers(ready[i])
            new = {name for name, value in values[i].items() if not isfinite(value)} - self._astray
            if new:  # those between it and the last one that was read may have been the first
                self._astray |= new
                before = max((j for j in values if j < i), default=-1)
                values |= {j: numbers(ready[j]) for j in range(before + 1, i)}
        self.skipped += len(ready) - len(values)
        return values


def numbers(call: Call) -> dict[str, float]:
    """The numbers of a call that has finished, without those that can't be read."""
    _, stretch, _, arrays = call
    read = ((name, number(array)) for name, array in zip(stretch.names, arrays, strict=True))
    return {name: value for name, value in read if value is not None}


def number(array: Any) -> float | None:
    """The value of an array, the last of several; None where it is not ready, was deleted, is of a call that failed, or
    lies on other hosts. Nothing is waited for."""
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
    except (RuntimeError, IndexError):  # deleted, no part of it here, or the call failed
        return None
