"""Arrays in parts, to be summed later: one part per shard of the batch, along a dimension put before all others."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..program.ir import Equation, Value
from ..program.primitives import bind
from .deferred import Deferred, joint, summands
from .layout import Axes, Layout, Spec, partition_spec


class Unreduced:
    """Makes, passes on and sums the arrays of `deferred`. The part of each shard of the batch lies on that shard;
    tensor parallel dimensions stay divided."""

    def __init__(self, layout: Layout, deferred: Deferred):
        self._layout, self._values, self._makers = layout, deferred.values, deferred.makers
        self._axes = layout.batch_axes
        self._shards = layout.count(layout.batch_axes)

    def spec(self, value: Value) -> Spec:
        """Where the parts of `value` lie."""
        return [self._axes, *self._whole(value)]

    def pin(self, x: Any, value: Value) -> Any:
        """`x`, the parts of `value`, each on its own shard."""
        spec = partition_spec(self.spec(value))
        return lax.with_sharding_constraint(x, NamedSharding(self._layout.mesh, spec))

    def made(self, e: Equation, values: list) -> Any:
        """What `e`, which sums over the batch, gives on every shard from its own examples."""
        dims, specs = self._makers[e.index], []
        adds = e.name == "scatter-add"  # to its first operand, which is in parts like the result
        for k, (v, d) in enumerate(zip(e.ins, dims, strict=True)):
            rank = 0 if v is None else len(self._layout.program.shapes[v])
            spec: Spec = [self._axes if i == d else () for i in range(rank)]
            specs.append(partition_spec([self._axes, *spec] if adds and k == 0 else spec))
        if adds and e.ins[0] not in self._values:
            values = [self.spread(values[0], e.outs[0]), *values[1:]]

        def on_shard(*operands):
            first = operands[0][0] if adds else operands[0]
            return bind(e.eqn, [first, *operands[1:]])[0][None]

        parts = jax.shard_map(
            on_shard,
            mesh=self._layout.mesh,
            in_specs=tuple(specs),
            out_specs=partition_spec([self._axes]),
            axis_names=set(self._axes),
            check_vma=False,
        )
        return self.pin(parts(*values), e.outs[0])

    def passed_on(self, e: Equation, values: list) -> list:
        """The results of the linear equation `e`, in parts, some of whose operands are."""
        parted = {k for k in summands(e) if e.ins[k] in self._values}
        if joint(e):
            for k in set(summands(e)) - parted:
                values[k] = self.spread(values[k], e.ins[k])
            parted = set(summands(e))
        in_axes = [0 if k in parted else None for k in range(len(values))]
        outs = jax.vmap(lambda *xs: bind(e.eqn, list(xs)), in_axes)(*values)
        return [self.pin(x, v) for x, v in zip(outs, e.outs, strict=True)]

    def spread(self, x: Any, value: Value | None) -> Any:
        """A whole array as parts: each device has what it stores of `value` and zeros elsewhere, and of several that
        store the same the first has it."""
        x = jnp.asarray(x)
        whole = self._whole(value) if value is not None else []
        scattered = self._stored(value, whole) if value is not None else []
        if value is None or not any(scattered):
            shard = lax.broadcasted_iota(jnp.int32, (self._shards, *x.shape), 0)
            parts = jnp.where(shard == 0, x[None], jnp.zeros((), x.dtype))
            return parts if value is None else self.pin(parts, value)

        def on_shard(part):
            for d, axes in enumerate(scattered):
                if axes:
                    size = part.shape[d]
                    shape = (*part.shape[:d], size * self._layout.count(axes), *part.shape[d + 1 :])
                    start = lax.axis_index(axes) * size
                    part = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, d)
            rest = self._rest(scattered)
            return (jnp.where(lax.axis_index(rest) == 0, part, 0) if rest else part)[None]

        parts = jax.shard_map(
            on_shard,
            mesh=self._layout.mesh,
            in_specs=_joined(whole, scattered),
            out_specs=partition_spec([self._axes, *whole]),
            check_vma=False,
        )(x)
        return self.pin(parts, value)

    def stacked(self, x: Any, value: Value) -> Any:
        """What a loop stacked, trips first, as the parts of `value`."""
        return self.pin(jnp.moveaxis(x, 1, 0), value)

    def reduced(self, x: Any, value: Value, dtype: Any) -> Any:
        """The sum of the parts, added up in `dtype`, each device holding what it stores of `value`.

        All axes are manual: over an automatic one the compiler would gather.
        """
        layout, whole, own = self._layout, self._whole(value), x.dtype
        simulated = layout.simulated
        # XLA for the CPU aborts on a sum in bfloat16.
        wire = jnp.promote_types(dtype, jnp.float32) if simulated else dtype
        scattered = self._stored(value, whole)
        rest = self._rest(scattered)

        def on_shard(part):
            total = part[0].astype(dtype).astype(wire)
            for d, axes in enumerate(scattered):
                if axes:
                    total = lax.psum_scatter(total, axes, scatter_dimension=d, tiled=True)
            return (lax.psum(total, rest) if rest else total).astype(own)

        total = jax.shard_map(
            on_shard,
            mesh=layout.mesh,
            in_specs=partition_spec([self._axes, *whole]),
            out_specs=_joined(whole, scattered),
            check_vma=False,
        )(x)
        return lax.with_sharding_constraint(
            total, NamedSharding(layout.mesh, partition_spec(layout.at_rest(value)))
        )

    def _rest(self, scattered: Spec) -> Axes:
        """The batch axes along which devices store the same."""
        return tuple(a for a in self._axes if not any(a in axes for axes in scattered))

    def _whole(self, value: Value) -> Spec:
        """What divides a part, never the axes that the parts lie along: what it is stored over, so that it need not
        move for that, or what tensor parallelism divides where it is stored whole."""
        stored, used = (
            [tuple(a for a in axes if a not in self._axes) for axes in spec]
            for spec in (self._layout.at_rest(value), self._layout.in_use(value))
        )
        return stored if any(stored) else used

    def _stored(self, value: Value, whole: Spec) -> Spec:
        """The batch axes that each dimension of `value` is stored over, where it divides over all of them."""
        layout, spec = self._layout, []
        sizes = layout.program.shapes[value]
        for size, used, stored in zip(sizes, whole, layout.at_rest(value), strict=True):
            axes: Axes = tuple(a for a in stored if a in self._axes)
            spec.append(axes if size % layout.count((*used, *axes)) == 0 else ())
        return spec


def _joined(first: Spec, then: Spec) -> PartitionSpec:
    return partition_spec([(*a, *b) for a, b in zip(first, then, strict=True)])
