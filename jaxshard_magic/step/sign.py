"""The output by which it is seen whether a call of a step has finished, as jax returns before the device has."""

from collections.abc import Callable
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


def is_done(output: Any) -> bool:
    """A buffer that a later call has taken over counts as done: nobody can ask it any more."""
    try:
        return output.is_deleted() or output.is_ready()
    except RuntimeError:  # deleted since
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
