"""Sums over the divided batch, as arrays in parts: one part per shard of the batch, along a dimension put before all
others. Each part lies on its own shard; tensor parallel dimensions stay divided, and so do experts, of which a shard of
the batch is then what the devices that have the same ones share."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ...program.ir import Equation, Value
from ...program.primitives import bind, bind_as, is_float
from ...program.xla_faults import widened
from ...targets.gathers import scatter, way
from ..layout import Axes, Layout, Spec, partition_spec, without
from .deferred import BatchDims


@dataclass(frozen=True, eq=False)
class Parts:
    """How sums over the examples of a step under a layout are made, kept and reduced as parts."""

    layout: Layout

    def _axes(self, value: Value) -> Axes:
        return self.layout.adding(value)

    def lies(self, value: Value) -> Spec:
        """How the parts of `value` lie."""
        return [self._axes(value), *self._whole(value)]

    def pin(self, x: Any, value: Value) -> Any:
        """`x`, the parts of `value`, each on its own shard."""
        return self.layout.pin(x, self.lies(value))

    def made(
        self, e: Equation, values: list, dims: BatchDims, dtype: Any = None, kept: Collection[Value] = ()
    ) -> Any:
        """What `e`, which sums over the batch, gives on every shard from its own examples. `dims`: the batch dimension
        of each operand; `dtype`: of what it gives, None for its own; `kept`: values that are in parts already."""
        specs, axes = [], self._axes(e.outs[0])
        adds = e.primitive.scatters  # to its first operand, which is in parts like the result
        for k, (v, d) in enumerate(zip(e.ins, dims, strict=True)):
            rank = 0 if v is None else len(self.layout.program.shapes[v])
            spec: Spec = [axes if i == d else () for i in range(rank)]
            specs.append(partition_spec([axes, *spec] if adds and k == 0 else spec))
        if adds and e.ins[0] not in kept:
            values = [self.spread(values[0], e.outs[0], e.outs[0]), *values[1:]]

        def on_shard(*operands):
            own = [operands[0][0] if adds else operands[0], *operands[1:]]
            if self.layout.simulated:
                own = widened(e, own, dtype or self.layout.program.avals[e.outs[0]].dtype)
            return (bind(e.eqn, own) if dtype is None else bind_as(e.eqn, own, dtype))[0][None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=tuple(specs),
            out_specs=partition_spec([axes]),
            axis_names=set(axes),
            check_vma=False,
        )
        return self.pin(parts(*values), e.outs[0])

    def spread(self, x: Any, value: Value | None, beside: Value) -> Any:
        """A whole array as parts, as many as of `beside`: each device has what it stores of `value` and zeros
        elsewhere, and of several that store the same the first has it."""
        x, over = jnp.asarray(x), self._axes(beside)
        whole = self._whole(value) if value is not None else []
        scattered = self._stored(value, whole) if value is not None else []
        if value is None or not any(scattered):
            shard = lax.broadcasted_iota(jnp.int32, (self.layout.count(over), *x.shape), 0)
            parts = jnp.where(shard == 0, x[None], jnp.zeros((), x.dtype))
            return parts if value is None else self.pin(parts, value)

        def on_shard(part):
            for d, axes in enumerate(scattered):
                if axes:
                    size = part.shape[d]
                    shape = (*part.shape[:d], size * self.layout.count(axes), *part.shape[d + 1 :])
                    start = lax.axis_index(axes) * size
                    part = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, d)
            rest = self._rest(over, scattered)
            return (jnp.where(lax.axis_index(rest) == 0, part, 0) if rest else part)[None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=_joined(whole, scattered),
            out_specs=partition_spec([over, *whole]),
            check_vma=False,
        )(x)
        return self.pin(parts, value)

    def reduced(self, x: Any, value: Value, dtype: Any) -> Any:
        """The sum of the parts, added up in `dtype`, each device holding what it stores of `value`.

        All axes are manual: over an automatic one the compiler would gather.
        """
        layout, whole, own = self.layout, self._whole(value), x.dtype
        # XLA for the CPU aborts on a sum in bfloat16; whole numbers stay so, float32 does not hold them all
        wire = jnp.promote_types(dtype, jnp.float32) if layout.simulated and is_float(dtype) else dtype
        scattered, over = self._stored(value, whole), self._axes(value)
        rest = self._rest(over, scattered)

        def on_shard(part):
            total = part[0].astype(dtype).astype(wire)
            for d, axes in enumerate(scattered):
                if axes:
                    total = scatter(total, d, way(layout.mesh, axes, scatters=True).steps, layout.mesh)
            return (lax.psum(total, rest) if rest else total).astype(own)

        total = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=partition_spec([over, *whole]),
            out_specs=_joined(whole, scattered),
            check_vma=False,
        )(x)
        return layout.pin(total, layout.at_rest(value))

    @staticmethod
    def _rest(over: Axes, scattered: Spec) -> Axes:
        """Those of the axes that parts lie along on which devices store the same."""
        return tuple(a for a in over if not any(a in axes for axes in scattered))

    def _whole(self, value: Value) -> Spec:
        """What divides a part, never the axes that the parts lie along: what it is stored over, so that it need not
        move for that, or what tensor parallelism divides where it is stored whole."""
        specs = self.layout.at_rest(value), self.layout.in_use(value)
        stored, used = (without(spec, self._axes(value)) for spec in specs)
        return stored if any(stored) else used

    def _stored(self, value: Value, whole: Spec) -> Spec:
        """The batch axes that each dimension of `value` is stored over, where it divides over all of them."""
        layout, spec, over = self.layout, [], self._axes(value)
        sizes = layout.program.shapes[value]
        for size, used, stored in zip(sizes, whole, layout.at_rest(value), strict=True):
            axes: Axes = tuple(a for a in stored if a in over)
            spec.append(axes if size % layout.count((*used, *axes)) == 0 else ())
        return spec


def _joined(first: Spec, then: Spec) -> PartitionSpec:
    return partition_spec([(*a, *b) for a, b in zip(first, then, strict=True)])
