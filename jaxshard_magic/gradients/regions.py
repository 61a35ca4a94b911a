"""Blocks in which values that the user named are computed again, and nothing else is."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax

from ..program.ir import Equation, Scope, Value
from .blocks import Block


@dataclass(frozen=True)
class AllBut:
    """A policy that keeps all but values with one of `names`, and what `primitives` make."""

    names: frozenset[str]
    primitives: frozenset[str]

    def __call__(self, primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name == "name":
            return params["name"] not in self.names
        return primitive.name not in self.primitives


def regions(scope: Scope, names: Collection[str]) -> tuple[list[Block], set[int]]:
    """From what makes each value with one of `names` to what uses it last, one block; overlapping ones are joined.

    In a block all is kept but those values and the forms of them that cost nothing to make. A policy sees primitives
    alone: the second result are the equations, by their index, with the primitive of one that is to be done again
    whose results are to be marked as kept.
    """
    found: list[tuple[int, int, set[int]]] = []  # first equation, end, those to do again
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
        chosen = {scope.equations[k].index for k in again}
        marked |= {e.index for e in inside if e.name in primitives and e.index not in chosen}
    return blocks, marked


def _policy(primitives: Collection[str], names: Collection[str], inside: list[Equation]) -> Any:
    if any(e.primitive.remat for e in inside):  # a policy that keeps things would keep those as well
        return jax.checkpoint_policies.nothing_saveable
    return AllBut(frozenset(names), frozenset(primitives))


def _made_by(scope: Scope, k: int) -> set[int]:
    """The named equation, what it names in other forms, and the equation that makes that."""
    born = {v: i for i, e in enumerate(scope.equations) for v in e.outs}
    found = {k}
    while (value := scope.equations[k].ins[0]) in born:
        k = born[value]
        found.add(k)
        if not scope.equations[k].primitive.alias:
            break
    return found


def _used_until(scope: Scope, k: int) -> int:
    """Where the last equation that reads the named value, or another form of it, ends."""
    forms: set[Value | None] = set(scope.equations[k].outs)
    stop = k + 1
    for i, e in enumerate(scope.equations[stop:], stop):
        if forms & set(e.ins):
            stop = i + 1
            if e.primitive.alias:
                forms.update(e.outs)
    return stop
