"""How far a running step has come, seen from another thread and without waiting for anything."""

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from .entry import Entry
from .sign import is_done

if TYPE_CHECKING:
    from .sharded import ShardedStep

AHEAD = 64  # calls looked back on; jax lets a program run about half as many ahead of its device


class Watch:
    """The calls of the step that it follows, and of those that it followed before.

    jax returns from a call before the device has done the work. So each call leaves one small output here, its
    loss where it has one, and the newest that is ready tells how many have finished. A step that nobody follows
    does nothing of this.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._recent: deque[tuple[int, Entry, Any]] = deque(maxlen=AHEAD)
        self._step: ShardedStep | None = None
        self._finished: tuple[int, float | None] = 0, None

    def follow(self, step: "ShardedStep") -> None:
        self.leave()
        self._step, step.watch = step, self._called

    def leave(self) -> None:
        """Follow no step, and let go of what the last one left here."""
        if self._step is not None:
            self._step.watch = None
        self._step = None
        self._recent.clear()

    def finished(self) -> tuple[int, float | None]:
        """How many calls have finished, and the newest loss that they gave."""
        before, loss = self._finished
        for n, entry, output in reversed(self._recent.copy()):
            if n <= before:
                break
            if output is None or is_done(output):
                if entry.plan.loss is not None and output is not None:
                    loss = _last_number(output, loss)
                self._finished = n, loss
                break
        return self._finished

    def _called(self, entry: Entry) -> None:
        self.calls += 1
        self._recent.append((self.calls, entry, entry.clock.sign))


def _last_number(output: Any, before: float | None) -> float | None:
    """The last element of an array that is ready; `before` where it can't be read, deleted or of a failed call."""
    try:
        if output.is_deleted() or not (output.is_fully_replicated or output.is_fully_addressable):
            return before
        values = np.asarray(output.addressable_data(0) if output.is_fully_replicated else output)
        return float(values.reshape(-1)[-1])
    except RuntimeError:
        return before
