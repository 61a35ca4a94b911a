"""Which values of a program that every device runs on its own part differ between the devices, and along which axes."""

from collections.abc import Mapping, Sequence
from typing import Any

from .ir import Equation, Program, Value
from .primitives import axis_names
from .primitives.primitive import Across
from .solver import Domain, solve

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
    return solve(program, _Varying(own_parts), [start.get(value, SAME) for value in program.inputs])


class _Varying(Domain[Axes]):
    """The axes along which devices have other numbers, as facts for `solver.solve`: sets, the larger for less alike."""

    bottom = SAME

    def __init__(self, own_parts: bool):
        self._own_parts = own_parts

    def join(self, first: Axes, second: Axes) -> Axes:
        """Return the axes of either."""
        return first | second

    def constant(self, number: Any) -> Axes:
        """Return none: a constant is the same on all devices."""
        return SAME

    def control(self, eqn: Equation, result: Axes, decider: Axes) -> Axes:
        """Return the axes of a result, and of the decision: devices that take other branches end with other values."""
        return result | decider

    def transfer(self, eqn: Equation, operands: Sequence[Axes]) -> list[Axes]:
        """Return the axes of the results, less those that a reduction or a gather over all devices takes away."""
        axes, every = frozenset(axis_names(eqn.eqn)), SAME.union(*operands)
        whole = eqn.params.get("axis_index_groups") is None  # a sum within groups differs from group to group
        if eqn.primitive.across is Across.ALIKE and len(eqn.outs) == len(eqn.ins):
            return [each - axes if whole else each for each in operands]
        if eqn.primitive.across is Across.PARTS and self._own_parts:
            every |= axes
        elif eqn.primitive.across is Across.PARTS and eqn.primitive.adds and whole:
            every -= axes
        return [every] * len(eqn.outs)
