"""Which buffers a step may take over: never the user's own, only arrays that the step itself gave back."""

import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from operator import call, is_
from typing import Any

from ..plan import Plan
from ..program.peel import Peeled
from ..program.settings import reruns
from ..program.trace import Traced


def to_donate(peeled: Peeled, traced: Traced, plan: Plan, donate: bool | None) -> tuple[int, ...]:
    """The flat inputs whose buffers an output can take: what the user's own jit says, and the step's state.

    Each needs an output of its shape, dtype and sharding, or XLA has no use for it. Under `jax_debug_nans` nothing is
    donated, as under `jax.jit`: the step may have to run again on its inputs.
    """
    if donate is False or reruns():
        return ()
    first = len(traced.consts)
    avals, outs = traced.closed.in_avals, traced.closed.out_avals
    wanted = {first + i for i, (_, _, donated) in enumerate(peeled.inputs) if donated}
    if donate:
        wanted |= set(plan.state_pairs.values())
    written = set(traced.out_paths)
    free = Counter((a.shape, a.dtype, s) for a, s in zip(outs, plan.out_shardings, strict=True))
    places = plan.in_shardings
    chosen = []
    for i in sorted(wanted):
        kind = (avals[i].shape, avals[i].dtype, places[i])
        stays = i - first < peeled.node_leaves and traced.in_paths[i] not in written
        if i >= first and free[kind] and not stays and not avals[i].weak_type:
            free[kind] -= 1
            chosen.append(i - first)
    return tuple(chosen)


class Ours:
    """The arrays that a step gave back, known by weak references for as long as they live."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref] = {}
        self._prune_at = 1024

    def add(self, arrays: Sequence[Any]) -> None:
        self._refs.update(zip(map(id, arrays), map(weakref.ref, arrays), strict=True))
        if len(self._refs) > self._prune_at:
            self._refs = {k: r for k, r in self._refs.items() if r() is not None}
            self._prune_at = max(1024, 2 * len(self._refs))

    def __contains__(self, array: Any) -> bool:
        ref = self._refs.get(id(array))
        return ref is not None and ref() is array

    def all(self, given: Sequence[Any], others: Sequence[Any]) -> bool:
        """May all of `given` be donated: ours, none twice and none among `others`, which the same call
        reads?"""
        ids = list(map(id, given))
        living = map(call, map(self._refs.get, ids, repeat(_nothing)))
        unique = set(ids)
        return all(map(is_, living, given)) and len(unique) == len(ids) and unique.isdisjoint(map(id, others))


def _nothing() -> None:
    """A reference to no array."""
