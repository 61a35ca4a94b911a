"""Which values of a program that every device runs on its own part differ between the devices, and along which axes."""

from collections.abc import Iterable, Mapping
from typing import Any

from .ir import Equation, Program, Scope, Value
from .primitives import axis_names
from .primitives.primitive import Across

Axes = frozenset[Any]  # the names of mapped axes; empty: the same on all devices
SAME: Axes = frozenset()


def varying(program: Program, start: Mapping[Value, Axes], *, own_parts: bool = True) -> list[Axes]:
    """The axes along which each value of `program` differs between devices, by its number.

    `start`: those of the inputs; what is not named is the same everywhere. A reduction or an all-gather over an axis
    gives all devices the same. With `own_parts` False, what differs only since each device was meant to have its own
    part (the number of the device, a part of a sum) counts as the same: then what is left lacks a reduction.

    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda w, x: (w * x, jax.lax.psum(w * x, "i")), axis_env=[("i", 8)])(1.0, 2.0)
    >>> program = Program(closed)
    >>> found = varying(program, {program.inputs[1]: frozenset({"i"})})
    >>> [set(found[v]) for v in program.outputs]
    [{'i'}, set()]
    """
    found = [SAME] * len(program.avals)
    for value, axes in start.items():
        found[value] = axes
    _Walk(found, own_parts).scope(program.top)
    return found


class _Walk:
    def __init__(self, found: list[Axes], own_parts: bool):
        self._found, self._own_parts = found, own_parts

    def of(self, value: Value | None) -> Axes:
        return SAME if value is None else self._found[value]

    def scope(self, scope: Scope) -> None:
        for e in scope.equations:
            if e.doors:
                self._through_doors(e)
            else:
                self._plain(e)

    def _pass(self, pairs: Iterable[tuple[Value | None, Value | None]]) -> bool:
        """Whether any of the values that are passed on brings something new."""
        news = False
        for a, b in pairs:
            if b is not None and not self.of(a) <= self._found[b]:
                self._found[b] |= self.of(a)
                news = True
        return news

    def _through_doors(self, e: Equation) -> None:
        for door in e.doors:
            self._pass((a, b) for a, b, _ in door.into)
        again = True
        while again:
            for door in e.doors:
                self.scope(door.scope)
            again = self._pass(pair for door in e.doors for pair in door.loop)
        for door in e.doors:
            self._pass([*((a, b) for a, b, _ in door.out), *door.skip])
        decided = self._decided_by(e)
        for out in e.outs:
            self._found[out] |= decided

    def _decided_by(self, e: Equation) -> Axes:
        """Devices that take other branches, or make more trips, end with other values."""
        if e.name == "cond":
            return self.of(e.ins[0])
        return self.of(e.doors[1].scope.outs[0]) if e.name == "while" else SAME

    def _plain(self, e: Equation) -> None:
        axes, every = frozenset(axis_names(e.eqn)), SAME.union(*map(self.of, e.ins))
        whole = e.params.get("axis_index_groups") is None  # a sum within groups differs from group to group
        if e.primitive.across is Across.ALIKE and len(e.outs) == len(e.ins):
            for a, out in zip(e.ins, e.outs, strict=True):
                self._found[out] |= self.of(a) - axes if whole else self.of(a)
            return
        if e.primitive.across is Across.PARTS and self._own_parts:
            every |= axes
        elif e.primitive.across is Across.PARTS and e.primitive.adds and whole:
            every -= axes
        for out in e.outs:
            self._found[out] |= every
