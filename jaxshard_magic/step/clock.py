"""How long a step takes in a loop, told over all of its calls from few that are waited for.

jax returns from a call before the device has done the work: a call's own seconds are those of its dispatch, and two
calls' starts lie a step apart only while the queue is full. So now and then a call is waited for, evenly over the loop.
What passes from the next call's start until all up to another such call have ended is the time of these, overlapped as
they are, and whether the loop blocks at each (`float(loss)`), at every tenth or never makes no difference to that.
"""

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from .sign import wait_for

EACH = 9  # up to this call of a loop each is waited for
GAP = 64  # calls from one that is waited for to the next: that costs its overlap with the host, one step in 64 at most
PARTS = 1000  # of a longer loop
OTHER_WORK = 1.25  # times as long as a step takes are calls apart between which the loop does something else
LOOP_S = 0.2e-3  # seconds that a loop and its `float(loss)` take themselves
PAUSE = 2  # times the usual: among these calls was an evaluation or a checkpoint, which is no step's time

STEP_TO_STEP, START_TO_END, COPIES = "step to step", "start to end", "copies"

Part = tuple[float, int]  # seconds, and the calls that they were for


@dataclass(frozen=True)
class Pace:
    """Seconds of a step: the least, the median over calls, the most. `calls`: those that they are of; `how` they were
    measured; `apart`: seconds from call to call, where that is clearly more than a step takes."""

    least: float
    median: float
    most: float
    calls: int
    how: str
    apart: float | None = None


class Clock:
    """One loop over a program: its calls, and what was measured of them. `first`: the call that is waited for first.

    `sign` is the output of the last call that tells whether it has finished. `waited` are the seconds of calls from
    their start to their end, nothing else under way; `copies` those of calls that are none of the loop's.
    """

    def __init__(self, first: int = 1):
        self.calls, self.next = 0, first
        self.sign: Any = None
        self.waited: list[float] = []
        self.copies: list[float] = []
        self._stretches: list[Part] = []
        self.opens = False  # the next call is the first after one that was waited for
        self._since: float | None = None  # when that first one began
        self._before = 0  # the calls before it

    def drain(self) -> None:
        """Wait until nothing of the loop is under way: the next call, which is waited for, begins."""
        if wait_for(self.sign) is None:
            self.breaks()
        self._stretch(None)

    def ended(self) -> None:
        """The call that is counted next was waited for, and has ended."""
        at = self.calls + 1
        self.next = at + (1 if at < EACH else max(min(at - 1, GAP), at // PARTS))
        self.opens = self.next > at + 1

    def open(self) -> None:
        """A call begins, with nothing under way, that is not waited for."""
        self.opens, self._since, self._before = False, time.perf_counter(), self.calls

    def settle(self) -> None:
        """Wait until the last call has finished: the loop may be over. Of one that had finished before it is not known
        when, and what passed since is taken where it is no more than the calls take."""
        seen, self.sign = wait_for(self.sign), None
        if seen is None:
            self.breaks()
        self.opens = seen is not None
        self._stretch(None if seen else _with_loop(self.waited))

    def breaks(self) -> None:
        """What happens now is none of the loop's: another program runs, or is compiled."""
        self.opens, self._since = False, None

    def pace(self) -> Pace | None:
        """What a step takes; None where nothing was measured."""
        alone, stretches = _alone(self.waited), self._stretches
        apart = _median(stretches) if stretches else None
        if apart is not None and alone and apart > _with_loop(self.waited):
            parts, how = alone, START_TO_END
        else:
            parts, how = [*alone, *stretches], STEP_TO_STEP if stretches else START_TO_END
            apart = None
        if len(self.copies) > sum(calls for _, calls in parts):
            parts, how, apart = _alone(self.copies), COPIES, None
        if not parts:
            return None
        usual = _median(parts)
        going = [part for part in parts if part[1] == 1 or _each(part) <= PAUSE * usual]
        each = [_each(part) for part in going]
        return Pace(min(each), usual, max(each), sum(calls for _, calls in going), how, apart)

    def _stretch(self, most: float | None) -> None:
        """All calls since the last that was waited for have ended, in at most so many seconds each."""
        since, calls = self._since, self.calls - self._before
        self._since = None
        if since is None:
            return
        part = time.perf_counter() - since, calls
        if most is None or _each(part) <= most:
            self._stretches.append(part)


def _with_loop(waited: Sequence[float]) -> float:
    """The most that lies between the calls of a loop that does nothing else; 0 where it is not known."""
    return OTHER_WORK * _median(_alone(waited)) + LOOP_S if waited else 0.0


def _alone(seconds: Sequence[float]) -> list[Part]:
    return [(each, 1) for each in seconds]


def _each(part: Part) -> float:
    return part[0] / part[1]


def _median(parts: Sequence[Part]) -> float:
    """Seconds of a call, the median over calls."""
    ordered = sorted(parts, key=_each)
    ends = list(accumulate(calls for _, calls in ordered))
    return _each(ordered[bisect_left(ends, ends[-1] / 2)])
