"""Calls of a loop's step: those not finished are read without waiting for the device, and finished ones give the
throughput."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from ..temporary import AcquiredLock

MIN_INTERVAL_S = 0.5  # seconds, at least: when a call finished is known only up to the time between two looks

MAX_CALLS = 256  # unread calls kept: their values take memory on the device
READ_TIME_SHARE = 0.004  # share of the time for reads: a read holds the GIL, which the loop needs
MAX_READ_SECONDS = 0.02  # seconds of one read, at most, after a long enough pause
# First calls of a run, read at any cost: the time of a process's first read says nothing about later ones.
ALWAYS_READ = 64


@dataclass(frozen=True)
class CallWork:
    """Work of one call of a program; None for an unknown amount.

    Attributes:
        examples: Examples in the batch.
        examples_rule: Text that names the array behind `examples`.
        tokens: Tokens in the batch.
        tokens_rule: Text that names the array behind `tokens`.
        flops: FLOPs of the matrix products on all devices.
        ideal_s: Seconds for these products, recomputed ones excluded, at the devices' peak.
    """

    examples: int | None = None
    examples_rule: str | None = None
    tokens: int | None = None
    tokens_rule: str | None = None
    flops: float | None = None
    ideal_s: float | None = None

    @cached_property
    def amounts(self) -> tuple[float | None, ...]:
        """Additive amounts, in the order of `WorkDone.amounts`."""
        return self.examples, self.tokens, self.flops, self.ideal_s


NO_WORK = (0.0,) * len(CallWork().amounts)


class WorkDone(NamedTuple):
    """Total work of all calls up to one.

    Attributes:
        calls: Number of calls.
        amounts: Sums of `CallWork.amounts`; None after a call with an unknown amount.
    """

    calls: int = 0
    amounts: tuple[float | None, ...] = NO_WORK

    def plus(self, calls: int, each: CallWork) -> "WorkDone":
        """Return the total after `calls` more calls of equal work."""
        more = (None if amount is None else calls * amount for amount in each.amounts)
        return WorkDone(self.calls + calls, tuple(map(_sum, self.amounts, more)))


@dataclass(frozen=True)
class CallSequence:
    """Consecutive calls of one program.

    Attributes:
        done_before: Work of all earlier calls.
        work: Work of each call.
        value_names: Names of the numbers returned by each call.
    """

    done_before: WorkDone = field(default_factory=WorkDone)
    work: CallWork = field(default_factory=CallWork)
    value_names: tuple[str, ...] = ()

    def done_after(self, number: int) -> WorkDone:
        """Return the work of all calls up to call `number`, which belongs to this sequence."""
        return self.done_before.plus(number - self.done_before.calls, self.work)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class RateMeter:
    """Rates over the intervals between looks at a loop."""

    def __init__(self) -> None:
        self._at: tuple[float, WorkDone] | None = None

    def skip_interval(self) -> None:
        """Exclude the current interval from rates, for example during a compile."""
        self._at = None

    def update(self, now: float, done: WorkDone) -> dict[str, float]:
        """Return rates since the previous look by name; empty at the first look, for too short an interval, or
        without a finished call.

        Args:
            now: Seconds on any clock.
            done: Work finished by now.
        """
        if self._at is None:
            self._at = now, done
            return {}
        then, before = self._at
        calls = done.calls - before.calls
        if now - then < MIN_INTERVAL_S or calls <= 0:
            return {}
        self._at = now, done
        seconds = now - then
        return {"step_s": seconds / calls} | dict(_rates(seconds, before, done))


def _rates(seconds: float, before: WorkDone, after: WorkDone) -> Iterator[tuple[str, float]]:
    names = ("examples_per_s", "tokens_per_s", "flops_per_s", "mfu")
    for name, a, b in zip(names, before.amounts, after.amounts, strict=True):
        if a is not None and b is not None and b > a:
            yield name, (b - a) / seconds


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
