"""Gradients of divided weights, scattered at once where the compiler would add them up whole first.

It does so on slices on which it makes one gather an all-reduce (see `targets.gathers`), and with the gradient of a
lookup. Here each shard of the batch makes its own sum, and devices scatter these, in steps where that takes some.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...plan import Sent
from ...program.ir import Equation, Value
from ..layout import Layout
from ..reductions import gradient_sum
from ..stepwise import in_steps
from .deferred import BatchDims, summed_batch
from .parts import Parts
from .region import Context, Emission, Region
from .sum_types import TypedSums, typed_sums


@dataclass(frozen=True, eq=False)
class Scattered(Region):
    """Sums over the examples that end where a divided weight rests. `makers`: the batch dimension of each operand, by
    the index of the equation; `typed`: those that add up in another type."""

    layout: Layout
    makers: Mapping[int, BatchDims]
    typed: TypedSums

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        parts, out, typed = Parts(self.layout), e.outs[0], e.index in self.typed.members
        own = self.layout.program.avals[out].dtype
        dtype = self.typed.dtype if typed else own
        operands = hold.before(e, values)
        if typed:
            operands = self.typed.operands(e, operands)
        made = parts.made(e, operands, self.makers[e.index], dtype if typed else None)
        return [parts.reduced(made, out, dtype).astype(own)]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands
        yield from gradient_sum(self.layout, e.outs[0], self.layout.adding(e.outs[0]), e.trips, by_hand=True)


def scattered(context: Context) -> Scattered:
    """The sums over the examples that wait for nothing and that the compiler would not scatter by itself. Not where
    positions are divided, too, over which they are added up as well."""
    layout, makers = context.layout, dict[int, BatchDims]()
    waiting = context.deferred.makers
    for e in () if layout.sequence else layout.program.equations:
        sums = e.outs[:1] if e.index not in waiting and not e.doors else ()
        if any(_by_hand(layout, e, out) for out in sums) and (dims := summed_batch(layout, e)) is not None:
            makers[e.index] = dims
    return Scattered(makers.keys(), layout, makers, typed_sums(context))


def _by_hand(layout: Layout, e: Equation, out: Value) -> bool:
    over = [
        axes
        for has in layout.at_rest(out)
        if (axes := tuple(axis for axis in has if axis in layout.adding(out)))
    ]
    return bool(over) and (e.primitive.scatters or any(in_steps(layout, axes) for axes in over))
