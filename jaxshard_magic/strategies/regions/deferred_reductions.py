"""Deferred sums over the examples as partial sums, reduced where a loop ends, once for all trips."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...plan import PlannedCollective
from ...program.ir import Equation, Value
from ...program.op_labels import GRADIENT
from ...program.phases import BACKWARD
from ...program.primitives import scan_counts
from ...program.xla_faults import bind_with_workaround
from ..layout import Layout, Spec, without_axes
from ..reductions import gradient_reductions, summed_axes
from .deferral_analysis import BatchDims, DeferredSums, needs_all_summands, summand_positions
from .partial_sums import PartialSumOps
from .reduction_dtypes import reduction_dtype
from .region import Context, Emission, Region


@dataclass(frozen=True)
class LoopSum:
    """Sum that is reduced where a loop ends.

    Attributes:
        path: Equations from the loop inwards, each in a body of the one before; the last made the (first) partial sum.
        is_gradient: Whether it belongs to the backward pass.
    """

    path: tuple[Equation, ...]
    is_gradient: bool


@dataclass(frozen=True, eq=False)
class DeferredReductions(Region):
    """Equations that make, pass on and reduce deferred sums over the examples.

    Attributes:
        layout: The layout.
        partial_values: Values represented by partial sums.
        makers: Equations that sum over the batch, by index, with the batch dimension of each operand.
        loop_sums: Sums reduced where a loop ends, by the index of the loop's equation and the position of the result.
        sum_dtype: Dtype of these reductions; None for the dtype of each sum.
    """

    layout: Layout
    partial_values: frozenset[Value]
    makers: Mapping[int, BatchDims]
    loop_sums: Mapping[tuple[int, int], LoopSum]
    sum_dtype: Any

    @property
    def partial_sums(self) -> PartialSumOps:
        return PartialSumOps(self.layout)

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        if e.index in self.makers:
            return [
                self.partial_sums.make(
                    e, lowering.before(e, values), self.makers[e.index], partial_values=self.partial_values
                )
            ]
        return self._emit_loop(e, values, default, lowering) if e.bodies else self._emit_linear(e, values)

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        if e.index in self.makers:
            yield from operand_collectives
            yield from self._immediate_reductions(e)
        else:
            yield from default
        for i, v in enumerate(e.results):
            if (loop_sum := self.loop_sums.get((e.index, i))) is not None:
                for sent in gradient_reductions(
                    self.layout, v, self.layout.gradient_sum_axes(v), e.trip_count, in_shard_map=True
                ):
                    yield replace(sent, equation=loop_sum.path[-1].index)

    def _immediate_reductions(self, e: Equation) -> Iterable[PlannedCollective]:
        """Return the reductions inside of one partial sum: over devices that share the positions of the examples."""
        by_dim = without_axes(summed_axes(self.layout, e), self.layout.gradient_sum_axes(e.results[0]))
        over = tuple(a for axes in by_dim for a in axes)
        return gradient_reductions(self.layout, e.results[0], over, e.trip_count, unscattered=True, axes_by_dim=by_dim)

    def boundary_spec(self, value: Value) -> Spec | None:
        return self.partial_sums.stacked_spec(value) if value in self.partial_values else None

    def _emit_loop(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        """Emit a loop: partial carries start as partial sums, and are reduced after the last trip unless later readers
        wait."""
        n, k = scan_counts(e.params)
        for i, v in enumerate(e.bodies[0].sub_jaxpr.inputs[n : n + k], n):
            if v in self.partial_values and e.operands[i] not in self.partial_values:
                values[i] = self.partial_sums.split_whole(values[i], v, v)
        outs = default(values)
        for i, v in enumerate(e.results):
            # A scan stacks along a new first dimension: that of the partial sums has to come first again.
            if i >= k and v in self.partial_values:
                outs[i] = self.partial_sums.pin(jnp.moveaxis(outs[i], 1, 0), v)
            elif (e.index, i) in self.loop_sums:
                loop_sum = self.loop_sums[e.index, i]
                with lowering.at(loop_sum.path):
                    dtype = reduction_dtype(self.sum_dtype, outs[i].dtype, gradient=loop_sum.is_gradient)
                    outs[i] = self.partial_sums.reduce(outs[i], v, dtype)
        return outs

    def _emit_linear(self, e: Equation, values: list) -> list:
        """Return the results of a linear equation as partial sums, from operands of which some are."""
        partial_positions = {k for k in summand_positions(e) if e.operands[k] in self.partial_values}
        if needs_all_summands(e):
            for k in set(summand_positions(e)) - partial_positions:
                values[k] = self.partial_sums.split_whole(values[k], e.operands[k], e.results[0])
            partial_positions = set(summand_positions(e))
        in_axes = [0 if k in partial_positions else None for k in range(len(values))]
        divided, cpu = self.layout.sharded_dim_predicate(e), self.layout.is_cpu
        outs = jax.vmap(lambda *xs: bind_with_workaround(e, list(xs), divided, cpu=cpu), in_axes)(*values)
        return [self.partial_sums.pin(x, v) for x, v in zip(outs, e.results, strict=True)]


def find_deferred_reductions(context: Context) -> DeferredReductions:
    """Find the sums that wait for the end of a loop, or for the caller."""
    layout, deferred = context.layout, context.deferred
    members = {*deferred.makers}
    for e in layout.program.equations if deferred.values else ():
        ends = (v for body in e.bodies for v in (*body.sub_jaxpr.inputs, *body.sub_jaxpr.outputs)) if e.is_scan else ()
        if not deferred.values.isdisjoint(ends if e.bodies else e.results):
            members.add(e.index)
    loop_sums = _loop_sums(context, deferred)
    return DeferredReductions(members, layout, deferred.values, deferred.makers, loop_sums, context.sum_dtype)


def _loop_sums(context: Context, deferred: DeferredSums) -> dict[tuple[int, int], LoopSum]:
    """Return the sums accumulated by loops and needed whole afterwards, with the best path to a maker."""
    flow, program = context.layout.flow, context.layout.program
    sums: dict[tuple[int, int], LoopSum] = {}
    if not deferred.makers:
        return sums
    maker_of = {program.equations[i].results[0]: program.equations[i] for i in deferred.makers}
    phase = context.phases

    def rank(e: Equation) -> tuple[bool, bool]:
        return not context.labels.get(e.index, "").startswith(GRADIENT), phase.get(e.index) != BACKWARD

    for e in (e for e in program.equations if e.is_scan):
        for k, (inside, outside, _) in enumerate(e.bodies[0].outputs):
            if inside in deferred.values and outside not in deferred.values:
                before = flow.ancestors([inside], lambda _v, w, _e: w in deferred.values)
                # Of several makers one with the name scope of a gradient comes first: the reduction is reported under
                # its name and line.
                maker = min((maker_of[v] for v in before if v in maker_of), key=rank)
                path = [maker]
                while (outer := path[0].parent) is not e and outer is not None:
                    path.insert(0, outer)
                sums[e.index, k] = LoopSum(tuple(path), phase.get(maker.index) == BACKWARD)
    return sums
