"""Loops over a step: each loop has a clock for every program called."""

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from ..compilation.compiled_step import CompiledStep
from ..compilation.loop_clock import LoopClock


class LoopTiming(NamedTuple):
    """Timing of a loop for one program.

    Attributes:
        clock: Clock of the program.
        calls: Calls of all programs in the loop.
    """

    clock: LoopClock
    calls: int


class StepLoops:
    """The current and the last loop over a step's programs. A single call after a loop is no loop.

    Args:
        entries: Programs of the step; the mapping is read, and may grow.
    """

    def __init__(self, entries: Mapping[Hashable, CompiledStep]):
        self._entries = entries
        self._last: dict[CompiledStep, LoopClock] = {}

    def start_loop(self) -> None:
        """Start another loop, with new clocks."""
        now = self._now()
        if self._is_loop(now):
            self._last = now
        # A copy of the values, as another thread may add a program meanwhile.
        for entry in list(self._entries.values()):
            # The very first run of a program is not measured.
            entry.clock = LoopClock(first_waited=1 if entry.calls else 2)

    @property
    def has_calls(self) -> bool:
        """Return whether the current loop has called the step."""
        return bool(self._now())

    def settle(self) -> None:
        """Wait for the last call, to measure the loop so far to its end."""
        for entry in list(self._entries.values()):
            entry.clock.settle()

    def discard_intervals(self) -> None:
        """Discard the open intervals of all clocks, as other work begins."""
        for entry in list(self._entries.values()):
            entry.clock.discard_interval()

    def restart(self) -> None:
        """Forget all calls so far."""
        self._last = {}
        for entry in self._entries.values():
            entry.calls, entry.clock = 0, LoopClock(first_waited=2)

    def timing_of(self, entry: CompiledStep) -> LoopTiming:
        """Return the timing for a report of `entry`: of the current loop, or of the last if there is none yet."""
        now = self._now()
        shown = now if self._is_loop(now) or entry not in self._last else self._last
        return LoopTiming(shown.get(entry, entry.clock), _calls(shown))

    def _now(self) -> dict[CompiledStep, LoopClock]:
        """Return the clocks of the current loop, for programs called in it."""
        return {entry: entry.clock for entry in list(self._entries.values()) if entry.clock.calls}

    def _is_loop(self, now: dict[CompiledStep, LoopClock]) -> bool:
        """Return whether the current loop counts as a loop: two calls, or as many as the last loop had if fewer."""
        return bool(now) and _calls(now) >= min(2, _calls(self._last))


def _calls(loop: dict[CompiledStep, LoopClock]) -> int:
    """Return the calls of all programs in a loop."""
    return sum(clock.calls for clock in loop.values())
