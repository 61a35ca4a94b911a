"""Find the axes along which values differ between devices, in a program run by each device on its shard."""

from collections.abc import Mapping, Sequence
from typing import Any

from .ir import Equation, Program, Value
from .primitives import axis_names
from .primitives.primitive import CollectiveOutput
from .solver import Domain, solve

AxisNames = frozenset[Any]  # names of mapped axes
SAME: AxisNames = frozenset()


def varying_axes(program: Program, start: Mapping[Value, AxisNames], *, own_parts: bool = True) -> list[AxisNames]:
    """Return the axes along which each value of `program` differs between devices, by value number.

    A reduction or an all-gather over an axis makes a value equal on all devices.

    Args:
        program: Per-device program.
        start: Axes of the inputs. Inputs not named are equal everywhere.
        own_parts: False counts values as equal that differ only because each device was meant to have a part (its
            device number, a part of a sum). Any value left then lacks a reduction.

    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda w, x: (w * x, jax.lax.psum(w * x, "i")), axis_env=[("i", 8)])(1.0, 2.0)
    >>> program = Program(closed)
    >>> axes = varying_axes(program, {program.inputs[1]: frozenset({"i"})})
    >>> [set(axes[v]) for v in program.outputs]
    [{'i'}, set()]
    """
    return solve(program, _VaryingAxes(own_parts), [start.get(value, SAME) for value in program.inputs])


class _VaryingAxes(Domain[AxisNames]):
    """Lattice of sets of axis names for `solver.solve`; a larger set is a weaker claim."""

    bottom = SAME

    def __init__(self, own_parts: bool):
        self._own_parts = own_parts

    def join(self, first: AxisNames, second: AxisNames) -> AxisNames:
        """Return the axes of either."""
        return first | second

    def constant(self, number: Any) -> AxisNames:
        """Return no axes: a constant is equal on all devices."""
        return SAME

    def control(self, eqn: Equation, result: AxisNames, decider: AxisNames) -> AxisNames:
        """Return the axes of result and decision: devices in different branches end with different values."""
        return result | decider

    def transfer(self, eqn: Equation, operands: Sequence[AxisNames]) -> list[AxisNames]:
        """Return the axes of the results, without those removed by a reduction or a gather over all devices."""
        axes, all_axes = frozenset(axis_names(eqn.jaxpr_eqn)), SAME.union(*operands)
        all_devices = eqn.params.get("axis_index_groups") is None  # a sum within groups differs from group to group
        if eqn.primitive.collective_output is CollectiveOutput.REPLICATED and len(eqn.results) == len(eqn.operands):
            return [each - axes if all_devices else each for each in operands]
        if eqn.primitive.collective_output is CollectiveOutput.PER_DEVICE and self._own_parts:
            all_axes |= axes
        elif (
            eqn.primitive.collective_output is CollectiveOutput.PER_DEVICE and eqn.primitive.is_additive and all_devices
        ):
            all_axes -= axes
        return [all_axes] * len(eqn.results)
