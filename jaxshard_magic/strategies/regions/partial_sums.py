"""Partial sums over the sharded batch: one for each shard, stacked along a new leading dimension.

Each partial sum is on its own shard. Tensor-parallel dimensions stay sharded, and so do experts; a shard of the batch
is then the set of devices with the same experts.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ...program.ir import Equation, Value
from ...program.primitives import bind, bind_with_dtype, is_float
from ...program.xla_faults import widen_operands
from ...targets.gathers import plan_gather, scatter
from ..layout import Axes, Layout, Spec, partition_spec, without_axes
from .deferral_analysis import BatchDims


@dataclass(frozen=True, eq=False)
class PartialSumOps:
    """Operations on partial sums over the examples: make, split and reduce."""

    layout: Layout

    def _part_axes(self, value: Value) -> Axes:
        return self.layout.gradient_sum_axes(value)

    def stacked_spec(self, value: Value) -> Spec:
        """Return the spec of the stacked partial sums of `value`."""
        return [self._part_axes(value), *self._part_spec(value)]

    def pin(self, x: Any, value: Value) -> Any:
        """Constrain `x`, the stacked partial sums of `value`, to one for each shard."""
        return self.layout.constrain(x, self.stacked_spec(value))

    def make(
        self, e: Equation, values: list, dims: BatchDims, dtype: Any = None, partial_values: Collection[Value] = ()
    ) -> Any:
        """Compute the partial sums of an equation that sums over the batch, on every shard from its own examples.

        Args:
            e: The equation.
            values: Its operands.
            dims: Batch dimension of each operand.
            dtype: Dtype of the result; None for the equation's own.
            partial_values: Values that are partial sums already.
        """
        specs, axes = [], self._part_axes(e.results[0])
        # A scatter adds to its first operand, which then has to be partial sums like the result.
        adds = e.primitive.is_scatter
        for k, (v, d) in enumerate(zip(e.operands, dims, strict=True)):
            rank = 0 if v is None else len(self.layout.program.shapes[v])
            spec: Spec = [axes if i == d else () for i in range(rank)]
            specs.append(partition_spec([axes, *spec] if adds and k == 0 else spec))
        if adds and e.operands[0] not in partial_values:
            values = [self.split_whole(values[0], e.results[0], e.results[0]), *values[1:]]

        def on_shard(*operands):
            own = [operands[0][0] if adds else operands[0], *operands[1:]]
            if self.layout.is_cpu:
                own = widen_operands(e, own, dtype or self.layout.program.avals[e.results[0]].dtype)
            return (bind(e.jaxpr_eqn, own) if dtype is None else bind_with_dtype(e.jaxpr_eqn, own, dtype))[0][None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=tuple(specs),
            out_specs=partition_spec([axes]),
            # Nothing is scattered here, so the other axes can stay automatic.
            axis_names=set(axes),
            check_vma=False,
        )
        return self.pin(parts(*values), e.results[0])

    def split_whole(self, x: Any, value: Value | None, like: Value) -> Any:
        """Split a whole array into partial sums: each device has its stored shard of `value`, and zeros elsewhere.

        Of several devices that store the same, the first has it.

        Args:
            x: The array.
            value: Its value; None for a literal.
            like: Value with the same number of partial sums.
        """
        x, over = jnp.asarray(x), self._part_axes(like)
        whole = self._part_spec(value) if value is not None else []
        scattered = self._scatter_spec(value, whole) if value is not None else []
        if value is None or not any(scattered):
            shard = lax.broadcasted_iota(jnp.int32, (self.layout.device_count(over), *x.shape), 0)
            # One partial sum has the value, and the others are zero.
            parts = jnp.where(shard == 0, x[None], jnp.zeros((), x.dtype))
            return parts if value is None else self.pin(parts, value)

        def on_shard(part):
            for d, axes in enumerate(scattered):
                if axes:
                    size = part.shape[d]
                    shape = (*part.shape[:d], size * self.layout.device_count(axes), *part.shape[d + 1 :])
                    start = lax.axis_index(axes) * size
                    part = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, d)
            rest = self._replicated_axes(over, scattered)
            return (jnp.where(lax.axis_index(rest) == 0, part, 0) if rest else part)[None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=_merged_spec(whole, scattered),
            out_specs=partition_spec([over, *whole]),
            check_vma=False,
        )(x)
        return self.pin(parts, value)

    def reduce(self, x: Any, value: Value, dtype: Any) -> Any:
        """Reduce partial sums to the stored spec of `value`.

        Args:
            x: The stacked partial sums.
            value: Their value.
            dtype: Dtype of the reduction.
        """
        layout, whole, own = self.layout, self._part_spec(value), x.dtype
        # XLA for the CPU aborts on a sum in bfloat16. Integers keep their dtype, as float32 can't hold them all.
        wire = jnp.promote_types(dtype, jnp.float32) if layout.is_cpu and is_float(dtype) else dtype
        scattered, over = self._scatter_spec(value, whole), self._part_axes(value)
        rest = self._replicated_axes(over, scattered)

        def on_shard(part):
            total = part[0].astype(dtype).astype(wire)
            for d, axes in enumerate(scattered):
                if axes:
                    total = scatter(total, d, plan_gather(layout.mesh, axes, scatters=True).steps, layout.mesh)
            return (lax.psum(total, rest) if rest else total).astype(own)

        # All axes are manual: over an automatic one XLA may gather in order to scatter over another.
        total = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=partition_spec([over, *whole]),
            out_specs=_merged_spec(whole, scattered),
            check_vma=False,
        )(x)
        return layout.constrain(total, layout.stored_spec(value))

    @staticmethod
    def _replicated_axes(over: Axes, scattered: Spec) -> Axes:
        """Return the axes of partial sums along which devices store the same."""
        return tuple(a for a in over if not any(a in axes for axes in scattered))

    def _part_spec(self, value: Value) -> Spec:
        """Return the spec of one partial sum, without the axes of the leading dimension."""
        specs = self.layout.stored_spec(value), self.layout.compute_spec(value)
        stored, used = (without_axes(spec, self._part_axes(value)) for spec in specs)
        # With its stored spec a partial sum need not be resharded when it is reduced.
        return stored if any(stored) else used

    def _scatter_spec(self, value: Value, part_spec: Spec) -> Spec:
        """Return the batch axes that each dimension of `value` is stored over; empty where it does not divide over all
        of them."""
        layout, spec, over = self.layout, [], self._part_axes(value)
        sizes = layout.program.shapes[value]
        for size, used, stored in zip(sizes, part_spec, layout.stored_spec(value), strict=True):
            axes: Axes = tuple(a for a in stored if a in over)
            spec.append(axes if size % layout.device_count((*used, *axes)) == 0 else ())
        return spec


def _merged_spec(first: Spec, second: Spec) -> PartitionSpec:
    return partition_spec([(*a, *b) for a, b in zip(first, second, strict=True)])
