"""How many steps hosts make from one meeting to the next."""

import math
import time

FEW = 32  # hosts that meet before every step: a meeting takes them 2.4 ms where all of them share two cores
SHARE = 0.01  # of the time of the steps that the meetings of more hosts may take
MOST = 256  # steps from one meeting to the next
FIRST = 8  # the meeting after which it is measured for the first time, then after twice as many each time


def steps_between(meeting_s: float, step_s: float) -> int:
    """Steps from one meeting to the next, so that a meeting of `meeting_s` seconds takes SHARE of them.

    >>> steps_between(0.0047, 0.2), steps_between(0.0047, 0.01), steps_between(0.0007, 0.2)
    (3, 47, 1)
    """
    return min(max(math.ceil(meeting_s / (SHARE * step_s)), 1), MOST) if step_s > 0 else MOST


def is_measured_at(meeting: int) -> bool:
    """Whether hosts agree on their pace anew at the meeting of this number, counted from 1."""
    return meeting >= FIRST and meeting & (meeting - 1) == 0


class Clock:
    """One host's times since it was last read: of its steps, and of the shortest meeting, which waited least."""

    def __init__(self) -> None:
        self._begin(0)

    def met(self, seconds: float) -> None:
        """Take the time of a meeting."""
        self._meetings.append(seconds)

    def read(self, steps: int) -> tuple[float, float]:
        """Seconds of a meeting and of a step, where `steps` were made altogether; and begin anew."""
        spent = time.monotonic() - self._since - sum(self._meetings)
        found = min(self._meetings, default=0.0), spent / max(steps - self._steps, 1)
        self._begin(steps)
        return found

    def _begin(self, steps: int) -> None:
        self._since, self._steps, self._meetings = time.monotonic(), steps, list[float]()
