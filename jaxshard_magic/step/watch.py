"""How far a running step has come, seen from another thread and without waiting for anything."""

from collections import deque
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

from .entry import Entry

if TYPE_CHECKING:
    from .sharded import ShardedStep

AHEAD = 64  # calls looked back on; jax lets a program run about half as many ahead of its device
MOST = 2**16  # elements of an output that is kept here


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
        self._entry: Entry | None = None
        self._pick: Callable[[Any], Any] = _nothing
        self._finished: tuple[int, float | None] = 0, None

    def follow(self, step: "ShardedStep") -> None:
        self.leave()
        self._step, step.watch = step, self._called

    def leave(self) -> None:
        """Follow no step, and let go of what the last one left here."""
        if self._step is not None:
            self._step.watch = None
        self._step = self._entry = None
        self._pick = _nothing
        self._recent.clear()

    def finished(self) -> tuple[int, float | None]:
        """How many calls have finished, and the newest loss that they gave."""
        before, loss = self._finished
        for n, entry, output in reversed(self._recent.copy()):
            if n <= before:
                break
            if output is None or _is_done(output):
                if entry.plan.loss is not None and output is not None:
                    loss = _last_number(output, loss)
                self._finished = n, loss
                break
        return self._finished

    def _called(self, entry: Entry, outs: Any) -> None:
        if entry is not self._entry:
            self._entry, self._pick = entry, _picker(entry)
        self.calls += 1
        self._recent.append((self.calls, entry, self._pick(outs)))


def _nothing(_outs: Any) -> None:
    """Picks nothing."""


def _picker(entry: Entry) -> Callable[[Any], Any]:
    """Takes from what the program gave the output that tells whether it has finished: the loss, else the smallest
    that no later call takes, else the smallest; nothing where all are large."""
    avals, state = entry.traced.closed.out_avals, entry.plan.state_pairs
    at = entry.plan.loss
    if at is None:
        small = [o for o, a in enumerate(avals) if isinstance(a.dtype, np.dtype) and a.size <= MOST]
        at = min(small, key=lambda o: (o in state, avals[o].size), default=None)
    if at is None:
        return _nothing
    if not entry.whole:
        return itemgetter(at)
    return _by_path(entry, at) or (lambda outs: jax.tree.leaves(outs)[at])


def _by_path(entry: Entry, at: int) -> Callable[[Any], Any] | None:
    """The leaf in the user's own tree, without opening all of it; None for trees of unknown kinds."""
    getters = [_getter(key) for key in entry.traced.out_paths[at][1:]]

    def pick(outs: Any) -> Any:
        for getter in getters:
            outs = getter(outs)
        return outs

    tree = entry.result.tree
    marks = [object() for _ in range(tree.num_leaves)]
    try:
        return pick if pick(tree.unflatten(marks)) is marks[at] else None
    except (TypeError, LookupError, AttributeError):
        return None


def _getter(key: Any) -> Callable[[Any], Any]:
    if isinstance(key, GetAttrKey):
        return attrgetter(key.name)
    return itemgetter(key.key if isinstance(key, DictKey) else getattr(key, "idx", None))


def _is_done(output: Any) -> bool:
    """A buffer that a later call has taken over counts as done: nobody can ask it any more."""
    try:
        return output.is_deleted() or output.is_ready()
    except RuntimeError:  # deleted since
        return True


def _last_number(output: Any, before: float | None) -> float | None:
    """The last element of an array that is ready; `before` where it can't be read, deleted or of a failed call."""
    try:
        if output.is_deleted() or not (output.is_fully_replicated or output.is_fully_addressable):
            return before
        values = np.asarray(output.addressable_data(0) if output.is_fully_replicated else output)
        return float(values.reshape(-1)[-1])
    except RuntimeError:
        return before
