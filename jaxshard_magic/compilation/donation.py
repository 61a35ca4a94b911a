"""Choose the buffers that a step may donate: never the user's own arrays, only arrays returned by the step itself."""

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import call, is_
from typing import Any

import jax

from ..errors import ShardError
from ..plan import Plan
from ..program.flatten_call import FlatCall, named_leaves
from ..program.jax_settings import is_donation_disabled
from ..program.trace import Traced
from ..program.unwrap import UnwrappedStep

_GONE = ("deleted or donated", "has been deleted")  # texts of JAX and its runtime about a deleted array


def choose_donated(flat_call: FlatCall, traced: Traced, plan: Plan, donate: bool | None) -> tuple[int, ...]:
    """Return the positions of flat inputs to donate: the inputs donated by the user's own jit, and the step's state.

    Each needs an output of equal shape, dtype and sharding, or XLA has no use for the buffer.

    Args:
        flat_call: The call, with flat inputs.
        traced: Traced step.
        plan: Plan of the step.
        donate: False for no donation; True to donate the state as well; None for the user's own jit alone.

    Returns:
        Positions among the flat inputs, without constants. Empty under `jax_debug_nans`.
    """
    # As under `jax.jit`, `jax_debug_nans` turns donation off: the step may have to run again on its inputs.
    if donate is False or is_donation_disabled():
        return ()
    first = len(traced.consts)
    avals, outs = traced.closed.in_avals, traced.closed.out_avals
    candidates = {first + i for i, (_, _, donated) in enumerate(flat_call.inputs) if donated}
    if donate:
        candidates |= set(plan.state_pairs.values())
    written = set(traced.out_paths)
    # Each output takes over one buffer at most.
    free = Counter((a.shape, a.dtype, s) for a, s in zip(outs, plan.out_shardings, strict=True))
    shardings = plan.placed_shardings
    chosen = []
    for i in sorted(candidates):
        kind = (avals[i].shape, avals[i].dtype, shardings[i])
        # An NNX Variable that the step does not write keeps its array after the call.
        stays = i - first < flat_call.node_leaf_count and traced.in_paths[i] not in written
        if i >= first and free[kind] and not stays and not avals[i].weak_type:
            free[kind] -= 1
            chosen.append(i - first)
    return tuple(chosen)


def raise_if_deleted(
    step: UnwrappedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception, own_outputs: "OwnOutputs"
) -> None:
    """Raise ShardError naming the first deleted argument, if `error` says that an array was deleted.

    Args:
        step: The step.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        error: Exception of the call.
        own_outputs: Arrays returned by the step itself.
    """
    if not any(said in str(error) for said in _GONE):
        return
    for path, x in named_leaves(step, args, kwargs):
        if not isinstance(x, jax.Array) or not x.is_deleted():
            continue
        if x in own_outputs:
            raise ShardError(
                f"{step.name}: {path} was donated to an earlier call, which made its result of it: go on with what "
                "that call returned, or leave donation out (--no-donate)"
            ) from None
        raise ShardError(
            f"{step.name}: {path} has been deleted: it was freed, or donated to another function"
        ) from None


class OwnOutputs:
    """Weak set of the living arrays returned by a step."""

    def __init__(self) -> None:
        # By id: `jax.Array` has no hash, which a WeakSet needs.
        self._refs: dict[int, weakref.ref] = {}
        self._prune_at = 1024

    def add(self, arrays: Sequence[Any]) -> None:
        """Add arrays; dead references are pruned now and then."""
        self._refs.update(zip(map(id, arrays), map(weakref.ref, arrays), strict=True))
        if len(self._refs) > self._prune_at:
            self._refs = {k: r for k, r in self._refs.items() if r() is not None}
            self._prune_at = max(1024, 2 * len(self._refs))

    def __contains__(self, array: Any) -> bool:
        # Python reuses the id of a dead object.
        ref = self._refs.get(id(array))
        return ref is not None and ref() is array

    def can_donate(self, donated: Sequence[Any], others: Sequence[Any]) -> bool:
        """Return whether all arrays of `donated` may be donated: returned by the step, none twice, and none among
        `others`.

        Args:
            donated: Arrays to donate.
            others: Arrays read by the same call.
        """
        # This runs at each call of a step: `map` with builtins loops in C.
        ids = list(map(id, donated))
        living = map(call, map(self._refs.get, ids, repeat(_nothing)))
        unique = set(ids)
        return all(map(is_, living, donated)) and len(unique) == len(ids) and unique.isdisjoint(map(id, others))


def _nothing() -> None:
    """Stand in for a weak reference to no array."""
