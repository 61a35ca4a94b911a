"""Number of steps between two barriers of a cell's hosts."""

import math
import time

# Up to this number of hosts there is a barrier before every step: 2.4 ms for 32 hosts on two cores.
MAX_HOSTS_EVERY_STEP = 32
SHARE = 0.01  # of the step time that barriers may take, above that number of hosts
MAX_INTERVAL = 256  # steps
FIRST_MEASURED = 8  # number of the barrier at which the interval is first measured


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


def is_measured_at(meeting: int) -> bool:
    """Return whether hosts agree on a new interval at this barrier, counted from 1: at `FIRST_MEASURED`, then at every
    power of two."""
    return meeting >= FIRST_MEASURED and meeting & (meeting - 1) == 0


class Clock:
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
