"""What a step is given by a loop whose batches are taken ahead: where they go, and how long it waited for them."""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .entry import Entry
    from .sharded import ShardedStep


class Giver(Protocol):
    """One who gave a loop arrays, and waits to see which inputs of a step they are. `feed` is whose they are."""

    @property
    def feed(self) -> "weakref.ref[Any]": ...

    def went(self, step: "ShardedStep", entry: "Entry", leaves: Sequence[Any]) -> "Waits | None":
        """A step is called with these flat inputs; what counts its waiting, where some are the giver's."""
        ...


waiting: "list[Giver]" = []  # while there are any, calls of steps take the long way


def tell(step: "ShardedStep", entry: "Entry", leaves: Sequence[Any]) -> None:
    """A step is called with these flat inputs, before hosts put theirs together."""
    for giver in tuple(waiting):
        waits = giver.went(step, entry, leaves)
        if waits is not None:
            step.fed, step.waits, waits.step = giver.feed, waits, weakref.ref(step)


class Waits:
    """Seconds that the devices of a step had nothing to do, as there was no batch, from the second batch on: the first
    call of a step compiles it.

    `since` and `until` are the ends of the time that is looked at, None before the second batch.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches = 0
        self.since: float | None = None
        self.until: float | None = None
        self.step: weakref.ref[ShardedStep] | None = None

    def gave(self, now: float, seconds: float) -> None:
        """The loop has its next batch, for which the devices waited so long."""
        self.batches += 1
        if self.since is None:
            self.since = now if self.batches == 2 else None
            return
        self.seconds, self.until = self.seconds + seconds, now

    @property
    def share(self) -> float | None:
        """Of the time that was looked at; None where there is none."""
        if self.since is None or self.until is None or self.until <= self.since:
            return None
        return min(1.0, self.seconds / (self.until - self.since))
