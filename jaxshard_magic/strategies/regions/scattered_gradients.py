"""Gradients of sharded weights, scattered directly where XLA would all-reduce them first.

XLA all-reduces gradients of lookups, and all gradients on slices with gathers turned into all-reduces. Here each shard
of the batch makes a partial sum, and devices scatter the partial sums, in several steps if a single step would become
an all-reduce.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...plan import PlannedCollective
from ...program.ir import Equation, Value
from ..layout import Layout
from ..reductions import gradient_reductions
from ..weight_gathers import needs_steps
from .deferral_analysis import BatchDims, summed_batch_dims
from .partial_sums import PartialSumOps
from .reduction_dtypes import TypedReductions, find_typed_reductions
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class ScatteredGradients(Region):
    """Sums over the examples that end under the stored spec of a sharded weight.

    Attributes:
        layout: The layout.
        makers: Batch dimension of each operand, by the index of the equation.
        typed_reductions: Sums that are reduced in another dtype.
    """

    layout: Layout
    makers: Mapping[int, BatchDims]
    typed_reductions: TypedReductions

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        parts, out, typed = PartialSumOps(self.layout), e.results[0], e.index in self.typed_reductions.members
        own = self.layout.program.avals[out].dtype
        dtype = self.typed_reductions.dtype if typed else own
        operands = lowering.before(e, values)
        if typed:
            operands = self.typed_reductions.cast_operands(e, operands)
        parts_array = parts.make(e, operands, self.makers[e.index], dtype if typed else None)
        return [parts.reduce(parts_array, out, dtype).astype(own)]

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        yield from operand_collectives
        yield from gradient_reductions(
            self.layout, e.results[0], self.layout.gradient_sum_axes(e.results[0]), e.trip_count, in_shard_map=True
        )


def find_scattered_gradients(context: Context) -> ScatteredGradients:
    """Find sums over the examples that are not deferred and that XLA would not scatter by itself.

    None if positions are sharded too, since such sums are over positions as well.
    """
    layout, makers = context.layout, dict[int, BatchDims]()
    waiting = context.deferred.makers
    for e in () if layout.position_classes else layout.program.equations:
        sums = e.results[:1] if e.index not in waiting and not e.bodies else ()
        if (
            any(_needs_manual_scatter(layout, e, out) for out in sums)
            and (dims := summed_batch_dims(layout, e)) is not None
        ):
            makers[e.index] = dims
    return ScatteredGradients(makers.keys(), layout, makers, find_typed_reductions(context))


def _needs_manual_scatter(layout: Layout, e: Equation, out: Value) -> bool:
    over = [
        axes
        for has in layout.stored_spec(out)
        if (axes := tuple(axis for axis in has if axis in layout.gradient_sum_axes(out)))
    ]
    # XLA all-reduces the gradient of a lookup, which is a scatter, before it shards it.
    return bool(over) and (e.primitive.is_scatter or any(needs_steps(layout, axes) for axes in over))
