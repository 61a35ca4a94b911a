"""Running sums, products, maxima, minima and log-sum-exps along a sharded dimension: each device runs over its own
block.

The result before a block is a single element along the dimension. The last elements of all blocks are gathered, and
every device runs over the gathered elements. XLA would gather the whole operand.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from ...plan import PlannedCollective
from ...program.ir import Equation
from ...program.primitives import bind
from ...program.primitives.sharding_rules import axis_dims
from ..layout import Axes, Layout, Spec
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class RunningReductions(Region):
    """Running reductions along a sharded dimension of their operand."""

    layout: Layout

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        layout, reverse = self.layout, e.params["reverse"]
        (x,), d = lowering.before(e, values), _running_dim(e)
        spec = _operand_spec(layout, e)
        blocks, combine, fill = layout.device_count(spec[d]), e.primitive.block_combiner, e.primitive.identity
        assert combine is not None and fill is not None

        def pin(x: Any, of_blocks: Axes, *inside: Axes) -> Any:
            return layout.constrain(x, [*spec[:d], of_blocks, *inside, *spec[d + 1 :]])

        split = pin(x.reshape(*x.shape[:d], blocks, -1, *x.shape[d + 1 :]), spec[d], ())
        within = pin(bind(e.jaxpr_eqn.replace(params={**e.params, "axis": d + 1}), [split])[0], spec[d], ())
        last = lax.index_in_dim(within, 0 if reverse else -1, d + 1, keepdims=False)
        ends = pin(pin(last, spec[d]), ())
        # Nothing comes before the first block: the identity of the reduction.
        edge = jnp.full((*ends.shape[:d], 1, *ends.shape[d + 1 :]), fill(ends.dtype))
        shifted = lax.slice_in_dim(ends, *((1, None) if reverse else (0, -1)), axis=d)
        before = lax.concatenate([shifted, edge] if reverse else [edge, shifted], d)
        # Constraints on both sides of each change of sharding: with one alone, the partitioner gathers.
        before = pin(pin(bind(e.jaxpr_eqn, [before])[0], ()), spec[d])
        beside = [i for i in range(within.ndim) if i != d + 1]
        combined = combine(within, lax.broadcast_in_dim(before, within.shape, beside))
        return lowering.after(e, [layout.constrain(pin(combined, spec[d], ()).reshape(x.shape), spec)])

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        yield from operand_collectives
        assert e.operands[0] is not None
        spec, d = _operand_spec(self.layout, e), _running_dim(e)
        axes, size = spec[d], self.layout.program.shapes[e.operands[0]][d]
        n = self.layout.device_count(axes)
        yield PlannedCollective(
            "all-gather", axes, n, self.layout.transfer_bytes(e.operands[0], spec) * n * n // size, e.trip_count
        )


def find_running_reductions(context: Context) -> RunningReductions:
    """Find running reductions along sharded dimensions, with blocks that are not empty."""
    layout = context.layout
    reductions = (e for e in layout.program.equations if e.primitive.block_combiner is not None)
    members = {
        e.index
        for e in reductions
        if e.operands[0] is not None and all(e.shapes[0]) and _operand_spec(layout, e)[_running_dim(e)]
    }
    return RunningReductions(members, layout)


def _running_dim(e: Equation) -> int:
    """Return the dimension that a running reduction runs over."""
    return axis_dims(e.params, len(e.shapes[0]))[0]


def _operand_spec(layout: Layout, e: Equation) -> Spec:
    """Return the spec of the operand and of the result."""
    v = e.operands[0]
    assert v is not None
    return layout.spec_in(e, v)
