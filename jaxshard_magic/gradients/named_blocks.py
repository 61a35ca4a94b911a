"""Blocks that recompute the values that the user named, and nothing else."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from ..program.ir import Equation, SubJaxpr, Value
from .blocks import Block


@dataclass(frozen=True)
class SaveAllBut:
    """Checkpoint policy that saves everything but some values.

    Attributes:
        names: Values with one of these names are recomputed.
        primitives: Results of these primitives are recomputed.
    """

    names: frozenset[str]
    primitives: frozenset[str]

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return params["name"] not in self.names
        return primitive.name not in self.primitives


def named_value_blocks(scope: SubJaxpr, names: Collection[str]) -> tuple[list[Block], set[int]]:
    """Return blocks that recompute named values, and the equations to mark as saved.

    A block reaches from the equation that makes a named value to its last use; overlapping blocks are joined. Inside of
    a block everything is saved but the named values and their free forms, such as reshapes.

    Args:
        scope: Jaxpr with the values.
        names: Names of the values to recompute.

    Returns:
        Blocks, and indices of equations with results to be saved. A policy sees nothing but primitives, so that an
        equation with the same primitive as a recomputed one has to be marked.
    """
    found: list[tuple[int, int, set[int]]] = []  # (start, stop, positions to recompute)
    for k, e in enumerate(scope.equations):
        if not e.primitive.names_value or e.params["name"] not in names:
            continue
        again = _made_by(scope, k)
        start, stop = min(again), _used_until(scope, k)
        if start < k and stop > k + 1:
            if found and start < found[-1][1]:
                first, end, others = found.pop()
                start, stop, again = min(start, first), max(stop, end), again | others
            found.append((start, stop, again))
    blocks, marked = [], set()
    for start, stop, again in found:
        inside = scope.equations[start:stop]
        primitives = {scope.equations[k].name for k in again}
        blocks.append(Block(start, stop, _policy(primitives, names, inside)))
        # A policy sees nothing but primitives, so it would recompute these equations too.
        chosen = {scope.equations[k].index for k in again}
        marked |= {e.index for e in inside if e.name in primitives and e.index not in chosen}
    return blocks, marked


def _policy(primitives: Collection[str], names: Collection[str], inside: list[Equation]) -> Any:
    if any(e.primitive.remat for e in inside):  # a policy that saves results would save those inside the remat as well
        return jax.checkpoint_policies.nothing_saveable
    return SaveAllBut(frozenset(names), frozenset(primitives))


def _made_by(scope: SubJaxpr, k: int) -> set[int]:
    """Return positions of the naming equation, of the forms that it names, and of the equation that makes them."""
    born = {v: i for i, e in enumerate(scope.equations) for v in e.results}
    found = {k}
    while (value := scope.equations[k].operands[0]) in born:
        k = born[value]
        found.add(k)
        if not scope.equations[k].primitive.alias:
            break
    return found


def _used_until(scope: SubJaxpr, k: int) -> int:
    """Return the position after the last equation that reads the named value or another form of it."""
    forms: set[Value | None] = set(scope.equations[k].results)
    stop = k + 1
    for i, e in enumerate(scope.equations[stop:], stop):
        if forms & set(e.operands):
            stop = i + 1
            if e.primitive.alias:
                forms.update(e.results)
    return stop
