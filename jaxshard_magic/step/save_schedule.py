"""Decide when to save a loop: every so many calls, or every so many seconds."""

import re
import time
from dataclasses import dataclass

from ..coordination import is_multiprocess, run_on_first
from ..errors import ShardError, quoted

# Time between two meetings of the hosts: the longer of these seconds and this share of the interval between saves.
MEETING_S, MEETING_SHARE = (0.2, 0.01)

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class SaveInterval:
    """Interval between saves, in calls or seconds.

    Attributes:
        calls: Number of calls; None for an interval in seconds.
        seconds: Number of seconds; None for an interval in calls.

    >>> SaveInterval.parse("10m"), SaveInterval.parse(100)
    (SaveInterval(calls=None, seconds=600.0), SaveInterval(calls=100, seconds=None))
    """

    calls: int | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, every: "int | str") -> "SaveInterval":
        """Parse an interval: `100` calls, `90s`, `10m` or `2h`. Raises ShardError for anything else."""
        parsed = re.fullmatch(r"0*([1-9]\d{0,6})([smh]?)", str(every).strip())
        if parsed is None or isinstance(every, bool):
            raise ShardError(
                f"--every takes a number of steps, or a time such as 90s, 10m or 2h, not {quoted(str(every))}"
            )
        number, unit = int(parsed[1]), parsed[2]
        return cls(seconds=number * _SECONDS[unit]) if unit else cls(calls=number)


class SaveSchedule:
    """Schedule of saves between the calls of a loop, the same on all hosts.

    Hosts have different clocks and must save before the same call, so the clock of host 0 counts. All hosts meet after
    calls known to all beforehand; there host 0 sends the decision, and the number of calls to the next meeting: as many
    as take `MEETING_S` seconds (or the share `MEETING_SHARE` of the interval), at most twice as many as before. The
    other hosts wait some 2 ms.

    Args:
        every: Interval between saves.
    """

    def __init__(self, every: SaveInterval):
        self._every, self._several = every, is_multiprocess()
        self._saved, self._since = 0, time.monotonic()
        self._next, self._between = (1, 1)  # call of the next meeting, and calls from the meeting before
        self._looked, self._looked_at = 0, self._since
        self._is_due = False

    def restart(self, calls: int) -> None:
        """Restart the interval after a save, or at a resumed position, after `calls` calls."""
        self._saved, self._since, self._is_due = calls, time.monotonic(), False
        self._looked, self._looked_at = calls, self._since
        self._next, self._between = calls + 1, 1

    def is_due(self, calls: int) -> bool:
        """Return whether to save after `calls` calls. Repeated questions are allowed; with several hosts, every host
        must ask."""
        if not calls or calls == self._saved:
            return False
        # A number of calls is the same on all hosts, without a meeting.
        if self._every.calls is not None:
            return calls % self._every.calls == 0
        if not self._several:
            return self._is_over()
        if calls >= self._next:
            decision = run_on_first(lambda: self._decide(calls)).split()
            self._is_due, self._between = decision[0] == "due", int(decision[1])
            self._next = calls + self._between
        return self._is_due

    def _is_over(self) -> bool:
        """Return whether the interval in seconds has passed on this host."""
        return time.monotonic() - self._since >= (self._every.seconds or 0)

    def _decide(self, calls: int) -> str:
        """Return the decision of host 0 and the number of calls to the next meeting, as text."""
        now, near = time.monotonic(), max(MEETING_S, MEETING_SHARE * (self._every.seconds or 0))
        each = (now - self._looked_at) / max(calls - self._looked, 1)
        self._looked, self._looked_at = calls, now
        between = min(max(int(near / max(each, 1e-9)), 1), 2 * self._between)
        return f"{'due' if self._is_over() else 'early'} {between}"
