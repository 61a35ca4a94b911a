"""The loops over a step: each has clocks of its own, one for each program that it calls."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from .clock import Clock
from .entry import Entry


class Timed(NamedTuple):
    """A loop, seen from one program: its clock, and the `calls` of all programs in the loop."""

    clock: Clock
    calls: int


class Loops:
    """The loop that runs over a step's programs, and the last one; a single call after a loop is none."""

    def __init__(self, entries: Mapping[Hashable, Entry]):
        self._entries = entries
        self._last: dict[Entry, Clock] = {}

    def begin(self) -> None:
        """From here on another loop runs."""
        now = self._now()
        if self._counts(now):
            self._last = now
        for entry in list(self._entries.values()):
            entry.clock = Clock(first=1 if entry.calls else 2)

    @property
    def running(self) -> bool:
        """Whether the loop that runs has called the step."""
        return bool(self._now())

    def settle(self) -> None:
        """Wait until the last call has finished, so that the loop so far is timed to its end."""
        for entry in list(self._entries.values()):
            entry.clock.settle()

    def breaks(self) -> None:
        """What happens now is none of the loop's."""
        for entry in list(self._entries.values()):
            entry.clock.breaks()

    def restart(self) -> None:
        """Forget all calls so far."""
        self._last = {}
        for entry in self._entries.values():
            entry.calls, entry.clock = 0, Clock(first=2)

    def of(self, entry: Entry) -> Timed:
        """What a report of `entry` tells of: the loop that runs, or the last where that is none yet."""
        now = self._now()
        shown = now if self._counts(now) or entry not in self._last else self._last
        return Timed(shown.get(entry, entry.clock), _calls(shown))

    def _now(self) -> dict[Entry, Clock]:
        return {entry: entry.clock for entry in list(self._entries.values()) if entry.clock.calls}

    def _counts(self, now: dict[Entry, Clock]) -> bool:
        return bool(now) and _calls(now) >= min(2, _calls(self._last))


def _calls(loop: dict[Entry, Clock]) -> int:
    return sum(clock.calls for clock in loop.values())
