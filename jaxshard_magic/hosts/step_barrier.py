"""Barrier before the steps of a cell, so that all hosts end the cell after the same step.

Before each step stand one barrier and one read of a key, of JAX's coordination service. A host that raises, ends early
or is interrupted sets the key of its next barrier and then comes to that barrier. The others read the key behind the
barrier and leave: nobody waits in a collective, and all hosts have the state of the same step.

- A call of another kind than the host's last one, with other shapes for example, sets the key as well. All hosts then
  compare their calls, before one begins a program unknown to another.
- Above `MAX_HOSTS_EVERY_STEP` (32) hosts, or on request, a barrier stands before every n-th step only. Host 0 measures
  n and publishes the number before a barrier; all read it behind that barrier. A host that raises between two barriers
  leaves the others in steps that never end (`CellOutcome.unfinished_steps`).
- Ctrl-C takes effect at the next barrier, never between a call and the assignment of its result. It takes effect at
  once before the first step, and the second time.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..coordination import BarrierTimeout, barrier, get_key, set_key

HOUR_S = 3600.0
LEAVING_S = 10.0
INTERRUPTED = "interrupted"

# Up to this number of hosts there is a barrier before every step: 2.4 ms for 32 hosts on two cores.
MAX_HOSTS_EVERY_STEP = 32
SHARE = 0.01  # of the step time that barriers may take, above that number of hosts
MAX_INTERVAL = 256  # steps
FIRST_MEASURED = 8  # number of the barrier at which the interval is first measured


class HostFailed(RuntimeError):
    """Another host failed or ended; this host has the state of the last step."""


def failure_text(error: BaseException) -> str:
    """Return the text that reports an exception to the other hosts."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


class Call(Protocol):
    """Step about to be called.

    Attributes:
        is_new: Whether the host's last call was of another kind.
    """

    is_new: bool

    def compare(self) -> None:
        """Compare the call with the calls of all hosts, which do the same. Raises on all hosts where they differ."""
        ...


class StepBarrier:
    """Barriers of one cell on one host.

    Args:
        cell: Name of the cell run, equal on all hosts and used once.
        host: Index of this host.
        hosts: Number of hosts.
        interval: Steps from one barrier to the next, equal on all hosts. None: 1 for up to `MAX_HOSTS_EVERY_STEP`
            hosts, else measured.

    Attributes:
        interval: Steps from one barrier to the next, at present.
        left: Whether this host comes to no more barriers.
        steps: Steps begun by this host.
    """

    def __init__(self, cell: str, host: int, hosts: int, interval: int | None = None):
        self._cell, self._host = cell, host
        self._measured = interval is None and hosts > MAX_HOSTS_EVERY_STEP
        self.interval = interval or 1
        self._clock = BarrierClock()
        self._meetings = 0
        self._due = 0  # number of steps at the next barrier
        self._asked = 0  # number of interrupts
        self.left = False
        self.steps = 0

    def before_step(self, call: Call | None = None) -> None:
        """Wait for the other hosts before a step, where a barrier is due.

        Args:
            call: The step about to be called.

        Raises:
            KeyboardInterrupt: One of the hosts was interrupted.
            HostFailed: One of the hosts failed or ended.
            Exception: From `call.compare()`, where hosts call different steps.
        """
        if self.steps == self._due:
            self._check(call)
            self._due += self.interval
        self.steps += 1

    def _check(self, call: Call | None) -> None:
        """Wait at one barrier, then read the reports of other hosts."""
        # Reports are set before the barrier and read behind it, so that all hosts see the same.
        if self._asked:
            self._report_end(INTERRUPTED)
        elif call is not None and call.is_new:
            self._request_look()
        measured = self._measured and _is_measured_at(self._meetings + 1)
        if measured and self._host == 0:
            # Host 0 alone measures: hosts with intervals of their own would wait at different steps.
            set_key(
                f"{self._key}/every/{self._meetings + 1}",
                str(steps_between(*self._clock.read(self.steps))),
            )
        start = time.monotonic()
        try:
            self._wait(HOUR_S)
        except BarrierTimeout as error:
            raise HostFailed(str(error)) from None
        look = get_key(f"{self._key}/look/{self._meetings}")
        self._clock.add_barrier(time.monotonic() - start)
        # One key tells whether there is anything to read: the normal step costs one barrier and one read.
        if look:
            self._raise_failure()
            if call is not None:
                call.compare()
        if measured:
            self.interval = int(get_key(f"{self._key}/every/{self._meetings}") or self.interval)

    def _raise_failure(self) -> None:
        """Raise where a host reported a failure for this barrier or an earlier one."""
        number, _, report = (get_key(f"{self._key}/failed") or "0 ").partition(" ")
        if 0 < int(number) <= self._meetings:
            self.left = True
            if report.endswith(f": {INTERRUPTED}"):
                raise KeyboardInterrupt
            raise HostFailed(report)

    def leave(self, why: str, seconds: float = LEAVING_S) -> None:
        """Tell the other hosts that this one makes no more steps, and release them from their barrier.

        Args:
            why: Reason, in a line.
            seconds: Time limit at the barrier, as perhaps no other host waits there.
        """
        if self.left:
            return
        self.left = True
        self._report_end(why)
        try:
            self._wait(seconds)
        except BarrierTimeout:
            return  # no host was waiting

    @contextmanager
    def around_cell(self) -> Iterator[None]:
        """Delay interrupts to the next barrier while a cell runs, and report an exception of the cell to the other
        hosts."""
        signal.signal(signal.SIGINT, self.interrupt)
        try:
            yield
        except HostFailed:
            raise
        except BaseException as error:
            self.leave(failure_text(error))
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late interrupt would end the engine

    @property
    def _key(self) -> str:
        return f"jaxshard/cell/{self._cell}"

    def _wait(self, seconds: float) -> None:
        self._meetings += 1
        barrier(f"{self._key}/{self._meetings}", seconds)

    def _report_end(self, why: str) -> None:
        """Report the end of this host's steps, with the number of its next barrier.

        Without the number a fast host's report reaches a slow host one barrier early, and the hosts end after different
        steps.
        """
        set_key(f"{self._key}/failed", f"{self._meetings + 1} host {self._host}: {why}"[:500])
        self._request_look()

    def _request_look(self) -> None:
        """Make all hosts read reports, and compare calls, at the next barrier."""
        # Several hosts may set the key.
        set_key(f"{self._key}/look/{self._meetings + 1}", "1", over=True)

    def interrupt(self, *_: Any) -> None:
        """Handle SIGINT: ask for an end at the next barrier. Raises KeyboardInterrupt before the first step and the
        second time."""
        self._asked += 1
        # Before the first step there is no result whose assignment could be lost.
        if self._asked > 1 or self._meetings == 0:
            raise KeyboardInterrupt


def steps_between(barrier_s: float, step_s: float) -> int:
    """Return the number of steps between two barriers, chosen so that barriers take `SHARE` of the step time.

    Args:
        barrier_s: Seconds of one barrier.
        step_s: Seconds of one step; 0 or less gives `MAX_INTERVAL`.

    Returns:
        Between 1 and `MAX_INTERVAL`.

    >>> steps_between(0.0047, 0.2), steps_between(0.0047, 0.01), steps_between(0.0007, 0.2)
    (3, 47, 1)
    """
    return min(max(math.ceil(barrier_s / (SHARE * step_s)), 1), MAX_INTERVAL) if step_s > 0 else MAX_INTERVAL


def _is_measured_at(meeting: int) -> bool:
    """Return whether hosts agree on a new interval at this barrier, counted from 1: at `FIRST_MEASURED`, then at every
    power of two."""
    return meeting >= FIRST_MEASURED and meeting & (meeting - 1) == 0


class BarrierClock:
    """Step and barrier times of one host since the last `read`."""

    def __init__(self) -> None:
        self._begin(0)

    def add_barrier(self, seconds: float) -> None:
        """Add the time of one barrier."""
        self._meetings.append(seconds)

    def read(self, steps: int) -> tuple[float, float]:
        """Return the seconds of a barrier and of a step, and start anew.

        Args:
            steps: Steps made so far, since the cell began.

        Returns:
            Time of the shortest barrier (0 without any), and mean time of a step outside barriers.
        """
        steps_s = time.monotonic() - self._since - sum(self._meetings)
        # The shortest barrier has the least time of waiting for slower hosts in it.
        times = min(self._meetings, default=0.0), steps_s / max(steps - self._steps, 1)
        self._begin(steps)
        return times

    def _begin(self, steps: int) -> None:
        self._since, self._steps, self._meetings = time.monotonic(), steps, list[float]()
