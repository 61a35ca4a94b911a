"""Choose a small output of a step to poll with `is_ready()`: dispatch is asynchronous."""

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

if TYPE_CHECKING:
    from .compiled_step import CompiledStep

MAX_ELEMENTS = 2**16  # elements; a probe stays on the device until the next call


def completion_probe(entry: "CompiledStep") -> Callable[[Any], Any]:
    """Return a function from a program's results to the output to poll; it returns None if all outputs are large.

    Preferred are the loss, then the smallest output not passed to a later call, then the smallest output.
    """
    avals, state = entry.traced.closed.out_avals, entry.plan.state_pairs
    at = entry.plan.loss
    if at is None:
        small = [o for o, a in enumerate(avals) if isinstance(a.dtype, np.dtype) and a.size <= MAX_ELEMENTS]
        # State comes last: the next call may donate it, and a donated buffer can't be polled.
        at = min(small, key=lambda o: (o in state, avals[o].size), default=None)
    if at is None:
        return _nothing
    return output_getter(entry, at)


def output_getter(entry: "CompiledStep", at: int) -> Callable[[Any], Any]:
    """Return a function from a program's results to the flat output `at`."""
    if not entry.takes_pytrees:
        return itemgetter(at)
    return _getter_by_path(entry, at) or (lambda outs: jax.tree.leaves(outs)[at])


def outputs_getter(entry: "CompiledStep", positions: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """Return a function from a program's results to several flat outputs.

    It runs at each call of a step, so it runs in C if the outputs share one container.
    """
    if len(positions) == 1:
        only = output_getter(entry, positions[0])
        return lambda outs: (only(outs),)
    if positions and not entry.takes_pytrees:
        return itemgetter(*positions)
    if positions and (siblings := _sibling_getter(entry, positions)) is not None:
        return siblings
    picks = [output_getter(entry, o) for o in positions]
    return lambda outs: [pick(outs) for pick in picks]


def is_done(output: Any) -> bool:
    """Return whether an output is ready. A donated buffer counts as ready, as it can't be polled."""
    try:
        return output.is_ready()
    except RuntimeError:  # deleted or donated
        return True


def wait_for_output(output: Any) -> bool | None:
    """Wait for the call that returned `output`.

    Returns:
        Whether waiting was necessary; None if unknown: there is no output, a later call took it over, or the call
        failed.
    """
    try:
        if output is None or output.is_deleted():
            return None
        if output.is_ready():
            return False
        output.block_until_ready()
    except RuntimeError:  # the device's error is raised where the result is read
        return None
    return True


def _nothing(_outs: Any) -> None:
    """Return no output."""


def _getter_by_path(entry: "CompiledStep", at: int) -> Callable[[Any], Any] | None:
    """Return a getter for one leaf of the user's own pytree by its path, without flattening; None for unknown pytree
    types."""
    pick = _chained([_getter(key) for key in entry.traced.out_paths[at][1:]])
    return pick if _is_right_getter(entry, [at], lambda outs: [pick(outs)]) else None


def _sibling_getter(entry: "CompiledStep", positions: Sequence[int]) -> Callable[[Any], Sequence[Any]] | None:
    """Return a getter for several leaves, if one dict or sequence in the user's own pytree contains all; else None."""
    paths = [entry.traced.out_paths[at][1:] for at in positions]
    if any(not path or path[:-1] != paths[0][:-1] or isinstance(path[-1], GetAttrKey) for path in paths):
        return None
    holder, items = (_chained([_getter(key) for key in paths[0][:-1]]), itemgetter(*(_key(p[-1]) for p in paths)))

    def pick(outs: Any) -> Sequence[Any]:
        return items(holder(outs))

    return pick if _is_right_getter(entry, positions, pick) else None


def _is_right_getter(entry: "CompiledStep", positions: Sequence[int], pick: Callable[[Any], Sequence[Any]]) -> bool:
    """Return whether a getter finds the flat outputs at `positions`, tested on a pytree of marks."""
    tree = entry.result.treedef
    marks = [object() for _ in range(tree.num_leaves)]
    # Classes of users may refuse leaves other than arrays, or have path keys that are no attributes or items.
    try:
        picked = pick(tree.unflatten(marks))
    except (TypeError, LookupError, AttributeError):
        return False
    return all(a is marks[at] for a, at in zip(picked, positions, strict=True))


def _chained(getters: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """Return the composition of getters, the first applied first."""
    if len(getters) == 1:
        return getters[0]

    def pick(outs: Any) -> Any:
        for getter in getters:
            outs = getter(outs)
        return outs

    return pick


def _getter(key: Any) -> Callable[[Any], Any]:
    """Return a getter for one key of a path."""
    if isinstance(key, GetAttrKey):
        return attrgetter(key.name)
    return itemgetter(_key(key))


def _key(key: Any) -> Any:
    """Return the dict key or sequence index of a path's key."""
    return key.key if isinstance(key, DictKey) else getattr(key, "idx", None)
