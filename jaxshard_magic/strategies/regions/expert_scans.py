"""Loops over experts in which each device does the trips of its own experts.

A scan of E trips becomes a scan of E/n trips, with the body mapped over the n shards of the expert axes. Tokens are
resharded before the loop, visible to all experts. Accumulated carries are partial sums, one for each shard, reduced
after the last trip.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import PlannedCollective
from ...program import control_flow
from ...program.experts import ExpertLoop
from ...program.ir import Equation, Value
from ...program.op_labels import COMBINE, DISPATCH
from ...program.primitives import scan_counts
from ..layout import Axes, Layout, Spec
from ..reductions import activation_reductions
from ..reshard_steps import reshard_collectives
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class ExpertScans(Region):
    """Scans over sharded experts.

    Attributes:
        layout: The layout.
        loops: The loops, by the index of their equation.
        axes: Mesh axes of the experts.
    """

    layout: Layout
    loops: Mapping[int, ExpertLoop]
    axes: Axes

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        loop, parts = self.loops[e.index], self.layout.device_count(self.axes)
        n, k = scan_counts(e.params)
        body_inputs, summed = loop.sub_jaxpr.inputs, sorted(loop.accumulators)
        read = {i: self._reshard_operand(e.operands[i], jnp.asarray(values[i])) for i in self._read_operands(loop)}
        trips = e.params["length"] // parts
        # Scans step over the first dimension: trips come first, then the shards, each with consecutive experts.
        stacks = [
            self._pin_part(read[i].reshape(parts, trips, *read[i].shape[1:]).swapaxes(0, 1), body_inputs[i], lead=1)
            for i in range(n + k, len(values))
        ]
        start = [jnp.asarray(values[n + i]) for i in summed]
        zeros = [jnp.zeros((parts, *x.shape), x.dtype) for x in start]
        sums = [self._pin_part(x, body_inputs[n + i]) for i, x in zip(summed, zeros, strict=True)]
        mapped = [0 if i - n in loop.accumulators or i >= n + k else None for i in range(len(values))]
        # `spmd_axis_name` adds the expert axes to the constraints in the body, for the mapped dimension.
        body = jax.vmap(lambda *xs: tuple(lowering.enter_body(loop.sub_jaxpr, xs)), mapped, spmd_axis_name=self.axes)

        def trip(carry: tuple, xs: tuple) -> tuple[tuple, tuple]:
            trip_inputs = read | {n + i: x for i, x in zip(summed, carry, strict=True)}
            trip_inputs |= dict(enumerate(xs, n + k))
            outs = body(*(trip_inputs[i] for i in range(len(values))))
            return tuple(outs[i] for i in summed), tuple(outs[k:])

        carried, stacked = control_flow.scan(e, trip, sums, tuple(stacks), trips)
        totals = {i: self._add_parts(e.results[i], x, own) for i, x, own in zip(summed, start, carried, strict=True)}
        wholes = (lax.collapse(jnp.moveaxis(x, 0, 1), 0, 2) for x in stacked)
        return [
            *(totals.get(i, values[n + i]) for i in range(k)),
            *(self.layout.constrain(x, self._stacked_spec(v)) for x, v in zip(wholes, e.results[k:], strict=True)),
        ]

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        layout, loop, parts = self.layout, self.loops[e.index], self.layout.device_count(self.axes)
        for v in dict.fromkeys(e.operands[i] for i in self._read_operands(loop)):
            if self._is_resharded(v):
                yield from reshard_collectives(
                    layout, v, layout.activation_spec(v), layout.operand_spec(v, True), e.trip_count
                )
        for move in default:
            # `default` counts the trips of all experts, and a device runs those of its own.
            yield replace(move, count=move.count // parts)
        for v in (e.results[i] for i in sorted(loop.accumulators)):
            if layout.is_activation(v):
                yield from activation_reductions(layout, v, self.axes, e.trip_count)

    def _read_operands(self, loop: ExpertLoop) -> list[int]:
        """Return the positions of operands that trips read: all but accumulated carries."""
        n = scan_counts(loop.equation.params)[0]
        return [i for i in range(len(loop.equation.operands)) if i - n not in loop.accumulators]

    def _is_resharded(self, v: Value | None) -> TypeGuard[Value]:
        """Return whether an operand is resharded for the experts."""
        return (
            v is not None
            and self.layout.is_activation(v)
            and self.layout.activation_spec(v) != self.layout.operand_spec(v, True)
        )

    def _reshard_operand(self, v: Value | None, x: Any) -> Any:
        """Return an operand as the loop reads it: tokens resharded so that experts see them all."""
        if not self._is_resharded(v):
            return x
        with jax.named_scope(DISPATCH):
            # XLA makes an all-to-all only with constraints on both sides of the change; with one alone, the partitioner
            # gathers.
            return self.layout.constrain(
                self.layout.constrain(x, self.layout.activation_spec(v)), self.layout.operand_spec(v, True)
            )

    def _pin_part(self, x: Any, inside: Value, lead: int = 0) -> Any:
        """Constrain one part for each shard of the experts, stacked along dimension `lead`."""
        layout = self.layout
        spec = layout.activation_spec(inside) if layout.is_activation(inside) else layout.stored_spec(inside)
        return layout.constrain(x, [*([()] * lead), self.axes, *spec])

    def _add_parts(self, v: Value, start: Any, x: Any) -> Any:
        layout, total = self.layout, x.sum(0).astype(x.dtype)
        if layout.is_activation(v):
            with jax.named_scope(COMBINE):
                # Two constraints for the same reason as in `_reshard_operand`.
                total = layout.constrain(
                    layout.constrain(total, layout.operand_spec(v, True)), layout.activation_spec(v)
                )
        else:
            total = layout.constrain(total, layout.stored_spec(v))
        return start + total

    def _stacked_spec(self, v: Value) -> Spec:
        """Return the spec of stacked results, by expert."""
        if self.layout.is_activation(v):
            return self.layout.activation_spec(v)
        spec = self.layout.stored_spec(v)
        # Matrices stacked for the backward pass are related to no parameter, so that no storage class shards their
        # experts.
        placed = any(a in axes for axes in spec for a in self.axes)
        return spec if placed else [self.axes, *spec[1:]]


def find_expert_scans(context: Context) -> ExpertScans:
    experts = context.layout.experts
    loops = {} if experts is None else experts.loops
    return ExpertScans(loops.keys(), context.layout, loops, () if experts is None else experts.axes)
