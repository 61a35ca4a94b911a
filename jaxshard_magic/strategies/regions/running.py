"""Running sums, products and maxima along a divided dimension: each device runs over its own block.

What comes before a block is one number for each element beside the dimension: the last ones of all blocks are gathered
and run over on every device. XLA would gather the whole operand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...plan import Sent
from ...program.ir import Equation
from ...program.primitives import bind
from ...program.primitives.sharding_rules import along
from ..layout import Axes, Layout, Spec
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class Running(Region):
    """The running reductions whose operand is divided along the dimension that they run over."""

    layout: Layout

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        layout, reverse = self.layout, e.params["reverse"]
        (x,), d = hold.before(e, values), _dimension(e)
        spec = _lying(layout, e)
        blocks, combine, fill = layout.count(spec[d]), e.primitive.running, e.primitive.fill
        assert combine is not None and fill is not None

        def pin(x: Any, of_blocks: Axes, *inside: Axes) -> Any:
            return layout.pin(x, [*spec[:d], of_blocks, *inside, *spec[d + 1 :]])

        split = pin(x.reshape(*x.shape[:d], blocks, -1, *x.shape[d + 1 :]), spec[d], ())
        within = pin(bind(e.eqn.replace(params={**e.params, "axis": d + 1}), [split])[0], spec[d], ())
        last = lax.index_in_dim(within, 0 if reverse else -1, d + 1, keepdims=False)
        ends = pin(pin(last, spec[d]), ())
        edge = jnp.full((*ends.shape[:d], 1, *ends.shape[d + 1 :]), fill(ends.dtype))
        kept = lax.slice_in_dim(ends, *((1, None) if reverse else (0, -1)), axis=d)
        before = lax.concatenate([kept, edge] if reverse else [edge, kept], d)
        before = pin(pin(bind(e.eqn, [before])[0], ()), spec[d])
        beside = [i for i in range(within.ndim) if i != d + 1]
        made = combine(within, lax.broadcast_in_dim(before, within.shape, beside))
        return hold.after(e, [layout.pin(pin(made, spec[d], ()).reshape(x.shape), spec)])

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands
        assert e.ins[0] is not None
        spec, d = _lying(self.layout, e), _dimension(e)
        axes, size = spec[d], self.layout.program.shapes[e.ins[0]][d]
        n = self.layout.count(axes)
        yield Sent("all-gather", axes, n, self.layout.moving(e.ins[0], spec) * n * n // size, e.trips)


def running(context: Context) -> Running:
    """The running reductions of a step along divided dimensions, whose parts are equal and not empty."""
    layout = context.layout
    reductions = (e for e in layout.program.equations if e.primitive.running is not None)
    members = {
        e.index
        for e in reductions
        if e.ins[0] is not None and all(e.shapes[0]) and _lying(layout, e)[_dimension(e)]
    }
    return Running(members, layout)


def _dimension(e: Equation) -> int:
    """The dimension that it runs over."""
    return along(e.params, len(e.shapes[0]))[0]


def _lying(layout: Layout, e: Equation) -> Spec:
    """How the operand lies, and the result."""
    v = e.ins[0]
    assert v is not None
    return layout.within(e, v)
