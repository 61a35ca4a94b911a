"""Measure the time of a step in a loop by waiting for a few calls.

JAX returns from a call before the device has finished. The seconds of a call alone are therefore the seconds of its
dispatch, and the starts of two calls are a step apart only while the queue is full. Now and then, evenly over the loop,
the clock waits for a call. The time from the start of the next call to the end of all calls up to another waited call,
with their overlap, is the time of the calls in between. Blocking by the loop at each call (`float(loss)`), at every
tenth or never does not change the result.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .completion_probe import wait_for_output

WAIT_FOR_FIRST = 9  # calls at the beginning of a loop, all of them waited for
GAP = 64  # calls between two waited calls: a wait costs the overlap with the host, so of one step in 64 at most
SAMPLES_PER_LOOP = 1000  # beyond GAP times as many calls, the gap is the calls so far divided by this
OTHER_WORK = 1.25  # step times; calls further apart mean that the loop does other work
LOOP_S = 0.2e-3  # seconds that the loop itself takes for a call and its `float(loss)`
PAUSE = 2  # times the usual time of a call: a longer interval contains an evaluation or a checkpoint

STEP_TO_STEP, START_TO_END, COPIES = "step to step", "start to end", "copies"

TimedCalls = tuple[float, int]  # seconds, and the number of calls that took them


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        shortest: Shortest time of a step.
        median: Median over calls.
        longest: Longest time of a step.
        calls: Number of calls measured.
        method: `STEP_TO_STEP`, `START_TO_END` or `COPIES`.
        call_interval: Seconds from call to call if clearly more than a step takes, else None.
    """

    shortest: float
    median: float
    longest: float
    calls: int
    method: str
    call_interval: float | None = None


class LoopClock:
    """Call counts and measured times of one loop over one program.

    `probe` is an output of the last call, to poll for its end. `waited_s` are the seconds from start to end of calls
    with nothing else running. `repeated_s` are the seconds of calls outside of the loop, on copies.

    Args:
        first_waited: Number of the first call to wait for.
    """

    def __init__(self, first_waited: int = 1):
        self.calls, self.next_waited = 0, first_waited
        self.probe: Any = None
        self.waited_s: list[float] = []
        self.repeated_s: list[float] = []
        self._intervals: list[TimedCalls] = []
        self.opens_interval = False  # whether the next call is the first after a waited call
        self._interval_start: float | None = None  # seconds of `time.perf_counter` at the interval's first call
        self._calls_before = 0  # calls before the interval

    def drain(self) -> None:
        """Wait for all running calls of the loop, before a call that is waited for."""
        if wait_for_output(self.probe) is None:
            self.discard_interval()
        self._close_interval(None)

    def record_end(self) -> None:
        """Record the end of a waited call, before it is counted, and choose the next call to wait for."""
        at = self.calls + 1
        self.next_waited = at + (1 if at < WAIT_FOR_FIRST else max(min(at - 1, GAP), at // SAMPLES_PER_LOOP))
        self.opens_interval = self.next_waited > at + 1

    def open_interval(self) -> None:
        """Start an interval at a call that is not waited for, with nothing else running."""
        self.opens_interval, self._interval_start, self._calls_before = False, time.perf_counter(), self.calls

    def settle(self) -> None:
        """Wait for the last call, as the loop may be over.

        If the call had finished before, the time of its end is unknown. The interval then counts only if it is no
        longer than the calls take.
        """
        seen, self.probe = wait_for_output(self.probe), None
        if seen is None:
            self.discard_interval()
        self.opens_interval = seen is not None
        # A call that has finished before ended at an unknown time, so the interval may contain other work of the loop.
        self._close_interval(None if seen else _max_call_interval(self.waited_s))

    def discard_interval(self) -> None:
        """Discard the open interval, as other work begins: another program runs, or is compiled."""
        self.opens_interval, self._interval_start = False, None

    def step_time(self) -> StepTime | None:
        """Return the time of a step; None without measurements."""
        alone, stretches = _single_calls(self.waited_s), self._intervals
        call_interval = _median_over_calls(stretches) if stretches else None
        # Calls are further apart than a step takes: the loop does other work, so the times of single calls are the
        # step's.
        if call_interval is not None and alone and call_interval > _max_call_interval(self.waited_s):
            parts, method = alone, START_TO_END
        else:
            parts, method = [*alone, *stretches], STEP_TO_STEP if stretches else START_TO_END
            call_interval = None
        if len(self.repeated_s) > sum(calls for _, calls in parts):
            parts, method, call_interval = _single_calls(self.repeated_s), COPIES, None
        if not parts:
            return None
        usual = _median_over_calls(parts)
        # A longer interval contains an evaluation or a checkpoint, and says nothing about the step.
        usual_parts = [part for part in parts if part[1] == 1 or _seconds_per_call(part) <= PAUSE * usual]
        each = [_seconds_per_call(part) for part in usual_parts]
        return StepTime(min(each), usual, max(each), sum(calls for _, calls in usual_parts), method, call_interval)

    def _close_interval(self, limit_s: float | None) -> None:
        """Close the interval since the last waited call; drop it if a call took more than `limit_s` seconds (None for
        no limit)."""
        since, calls = self._interval_start, self.calls - self._calls_before
        self._interval_start = None
        if since is None:
            return
        part = time.perf_counter() - since, calls
        if limit_s is None or _seconds_per_call(part) <= limit_s:
            self._intervals.append(part)


def _max_call_interval(waited: Sequence[float]) -> float:
    """Return the longest time between calls of a loop without other work, in seconds; 0 if unknown."""
    return OTHER_WORK * _median_over_calls(_single_calls(waited)) + LOOP_S if waited else 0.0


def _single_calls(seconds: Sequence[float]) -> list[TimedCalls]:
    """Return intervals of one call each."""
    return [(each, 1) for each in seconds]


def _seconds_per_call(part: TimedCalls) -> float:
    """Return the seconds of one call of an interval."""
    return part[0] / part[1]


def _median_over_calls(parts: Sequence[TimedCalls]) -> float:
    """Return the seconds of a call, the median over calls."""
    ordered = sorted(parts, key=_seconds_per_call)
    ends = list(accumulate(calls for _, calls in ordered))
    return _seconds_per_call(ordered[bisect_left(ends, ends[-1] / 2)])
