"""How often a loop is saved: after so many calls, or when so much time has passed; and whether it is time."""

import re
import time
from dataclasses import dataclass

from ..coordination import from_first, is_there
from ..errors import ShardError, quoted

LOOK_S, LOOK = 0.2, 0.01  # hosts look at the clock this often, or at this share of the time between saves

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Interval:
    """One of both is None.

    >>> Interval.of("10m"), Interval.of(100)
    (Interval(calls=None, seconds=600.0), Interval(calls=100, seconds=None))
    """

    calls: int | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, every: "int | str") -> "Interval":
        """As it is written: `100` calls, `90s`, `10m` or `2h`. Raises ShardError for anything else."""
        found = re.fullmatch(r"0*([1-9]\d{0,6})([smh]?)", str(every).strip())
        if found is None or isinstance(every, bool):
            raise ShardError(
                f"--every takes a number of steps, or a time such as 90s, 10m or 2h, not {quoted(str(every))}"
            )
        number, unit = int(found[1]), found[2]
        return cls(seconds=number * _SECONDS[unit]) if unit else cls(calls=number)


class Due:
    """Whether a loop is to be saved before its next call.

    Hosts have clocks of their own and save before the same call, so the first one's clock counts. It tells the others
    after calls that all know beforehand: each time it says as well how many calls there are to the next, as it takes
    them for LOOK_S seconds, at most twice as many as before. The others wait for it there, some 2 ms.
    """

    def __init__(self, every: Interval):
        self._every, self._several = every, is_there()
        self._saved, self._since = 0, time.monotonic()
        self._next, self._between = (
            1,
            1,
        )  # the calls after which hosts look, and how many come to the one after that
        self._looked, self._looked_at = 0, self._since
        self._found = False

    def begin(self, calls: int) -> None:
        """The loop was saved after so many calls, or goes on from there."""
        self._saved, self._since, self._found = calls, time.monotonic(), False
        self._looked, self._looked_at = calls, self._since
        self._next, self._between = calls + 1, 1

    def now(self, calls: int) -> bool:
        """Is it time, after so many calls? It may be asked again; on several hosts all ask."""
        if not calls or calls == self._saved:
            return False
        if self._every.calls is not None:
            return calls % self._every.calls == 0
        if not self._several:
            return self._is_over()
        if calls >= self._next:
            said = from_first(lambda: self._look(calls)).split()
            self._found, self._between = said[0] == "due", int(said[1])
            self._next = calls + self._between
        return self._found

    def _is_over(self) -> bool:
        return time.monotonic() - self._since >= (self._every.seconds or 0)

    def _look(self, calls: int) -> str:
        now, near = time.monotonic(), max(LOOK_S, LOOK * (self._every.seconds or 0))
        each = (now - self._looked_at) / max(calls - self._looked, 1)
        self._looked, self._looked_at = calls, now
        between = min(max(int(near / max(each, 1e-9)), 1), 2 * self._between)
        return f"{'due' if self._is_over() else 'early'} {between}"
