"""Find the inputs of a step that come from a prefetching feed, and measure the time spent waiting for batches."""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from ..compilation.compiled_step import CompiledStep


class InputMatcher(Protocol):
    """Protocol of a feed that looks for its arrays among the inputs of steps.

    `feed` is a weak reference to the feed.
    """

    @property
    def feed(self) -> "weakref.ref[Any]": ...

    def match_inputs(self, step: Any, entry: CompiledStep, leaves: Sequence[Any]) -> "FeedWaits | None":
        """Look for the feed's arrays among the flat inputs of a call.

        Args:
            step: The called step.
            entry: Program of the call.
            leaves: Flat inputs of the call.

        Returns:
            The counter for waiting times of the step; None if no array comes from the feed.
        """
        ...


waiting_matchers: "list[InputMatcher]" = []  # while not empty, calls of steps take the slow path


def match_feed(step: Any, entry: CompiledStep, leaves: Sequence[Any]) -> "tuple[weakref.ref[Any], FeedWaits] | None":
    """Offer the flat inputs of a call to all waiting feeds, before hosts join their parts.

    Args:
        step: The called step.
        entry: Program of the call.
        leaves: Flat inputs of the call.

    Returns:
        The feed of the inputs, the last if there are several, and its waiting times; None without one.
    """
    matched = None
    # A copy, as a feed that finds its arrays removes itself from the list.
    for giver in tuple(waiting_matchers):
        waits = giver.match_inputs(step, entry, leaves)
        if waits is not None:
            waits.step = weakref.ref(step)
            matched = giver.feed, waits
    return matched


class FeedWaits:
    """Idle time of a step's devices for lack of a batch, from the second batch on.

    `start` and `end` bound the measured time (seconds of the caller's clock). `start` is None before the second batch,
    `end` before the third.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches = 0
        self.start: float | None = None
        self.end: float | None = None
        self.step: weakref.ref[Any] | None = None

    def record_batch(self, now: float, seconds: float) -> None:
        """Record the next batch of the loop.

        Args:
            now: Current time in seconds.
            seconds: Idle time of the devices before this batch.
        """
        self.batches += 1
        if self.start is None:
            # The first call compiles the step, so measuring begins at the second batch.
            self.start = now if self.batches == 2 else None
            return
        self.seconds, self.end = self.seconds + seconds, now

    @property
    def share(self) -> float | None:
        """Idle share of the measured time, from 0 to 1; None without measured time."""
        if self.start is None or self.end is None or self.end <= self.start:
            return None
        return min(1.0, self.seconds / (self.end - self.start))
