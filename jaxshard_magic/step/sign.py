"""The output by which it is seen whether a call of a step has finished, as jax returns before the device has."""

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

if TYPE_CHECKING:
    from .entry import Entry

MOST = 2**16  # elements of an output that is kept here


def sign_of(entry: "Entry") -> Callable[[Any], Any]:
    """Takes from what the program gave the output that tells whether it has finished: the loss, else the smallest
    that no later call takes, else the smallest; nothing where all are large."""
    avals, state = entry.traced.closed.out_avals, entry.plan.state_pairs
    at = entry.plan.loss
    if at is None:
        small = [o for o, a in enumerate(avals) if isinstance(a.dtype, np.dtype) and a.size <= MOST]
        at = min(small, key=lambda o: (o in state, avals[o].size), default=None)
    if at is None:
        return _nothing
    return picker_of(entry, at)


def picker_of(entry: "Entry", at: int) -> Callable[[Any], Any]:
    """Takes the flat output `at` from what the program gave."""
    if not entry.whole:
        return itemgetter(at)
    return _by_path(entry, at) or (lambda outs: jax.tree.leaves(outs)[at])


def picker_of_all(entry: "Entry", places: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """Takes several flat outputs at once, in C where they lie beside each other; each call of a step does this."""
    if len(places) == 1:
        only = picker_of(entry, places[0])
        return lambda outs: (only(outs),)
    if places and not entry.whole:
        return itemgetter(*places)
    if places and (beside := _beside(entry, places)) is not None:
        return beside
    picks = [picker_of(entry, o) for o in places]
    return lambda outs: [pick(outs) for pick in picks]


def is_done(output: Any) -> bool:
    """A buffer that a later call has taken over counts as done: nobody can ask it any more."""
    try:
        return output.is_ready()
    except RuntimeError:  # deleted
        return True


def wait_for(output: Any) -> bool | None:
    """Wait until the call has finished that gave `output`; whether it had to be waited for, None where it can't be
    seen: there is no output, a later call took it over, or the call failed."""
    try:
        if output is None or output.is_deleted():
            return None
        if output.is_ready():
            return False
        output.block_until_ready()
    except RuntimeError:  # of the device: whoever reads the result is told
        return None
    return True


def _nothing(_outs: Any) -> None:
    """Picks nothing."""


def _by_path(entry: "Entry", at: int) -> Callable[[Any], Any] | None:
    """The leaf in the user's own tree, without opening all of it; None for trees of unknown kinds."""
    pick = _chained([_getter(key) for key in entry.traced.out_paths[at][1:]])
    return pick if _finds(entry, [at], lambda outs: [pick(outs)]) else None


def _beside(entry: "Entry", places: Sequence[int]) -> Callable[[Any], Sequence[Any]] | None:
    """The leaves at `places`, several, where one dict or sequence in the user's own tree holds them all."""
    paths = [entry.traced.out_paths[at][1:] for at in places]
    if any(not path or path[:-1] != paths[0][:-1] or isinstance(path[-1], GetAttrKey) for path in paths):
        return None
    holder, items = (
        _chained([_getter(key) for key in paths[0][:-1]]),
        itemgetter(*(_key(p[-1]) for p in paths)),
    )

    def pick(outs: Any) -> Sequence[Any]:
        return items(holder(outs))

    return pick if _finds(entry, places, pick) else None


def _finds(entry: "Entry", places: Sequence[int], pick: Callable[[Any], Sequence[Any]]) -> bool:
    tree = entry.result.tree
    marks = [object() for _ in range(tree.num_leaves)]
    try:
        found = pick(tree.unflatten(marks))
    except (TypeError, LookupError, AttributeError):
        return False
    return all(a is marks[at] for a, at in zip(found, places, strict=True))


def _chained(getters: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    if len(getters) == 1:
        return getters[0]

    def pick(outs: Any) -> Any:
        for getter in getters:
            outs = getter(outs)
        return outs

    return pick


def _getter(key: Any) -> Callable[[Any], Any]:
    if isinstance(key, GetAttrKey):
        return attrgetter(key.name)
    return itemgetter(_key(key))


def _key(key: Any) -> Any:
    return key.key if isinstance(key, DictKey) else getattr(key, "idx", None)
