"""Sums over the examples that wait, as arrays in parts: one part per shard of the batch, along a dimension put before
all others. Where a loop ends, what it added up in parts is reduced, once for all its trips."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ...plan import Sent
from ...program.ir import Equation, Value
from ...program.labels import GRADIENT
from ...program.phases import BACKWARD
from ...program.primitives import bind, is_float, scan_counts
from ..layout import Axes, Layout, Spec, partition_spec, without
from ..reductions import gradient_sum
from .deferred import BatchDims, Deferred, joint, summands
from .region import Context, Emission, Region
from .sum_types import sum_type


@dataclass(frozen=True)
class LoopSum:
    """A sum that is reduced where a loop ends. `path`: the equation in the loop that made the parts, or the first of
    them, after those whose bodies it is in, from the loop inwards. `gradient`: it belongs to the backward pass."""

    path: tuple[Equation, ...]
    gradient: bool


@dataclass(frozen=True, eq=False)
class Unreduced(Region):
    """The equations that make, pass on and reduce the sums over the examples that wait. The part of each shard of the
    batch lies on that shard; tensor parallel dimensions stay divided.

    `values`: those that are in parts. `makers`: the equations that sum over the batch and make them, by index, with the
    batch dimension of each operand. `loop_sums`: what is reduced where a loop ends, by the index of the loop's equation
    and the position among its results. `sum_dtype`: the type in which devices add up there, None for each in its own.
    """

    layout: Layout
    values: frozenset[Value]
    makers: Mapping[int, BatchDims]
    loop_sums: Mapping[tuple[int, int], LoopSum]
    sum_dtype: Any

    @property
    def _axes(self) -> Axes:
        return self.layout.batch_axes

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        if e.index in self.makers:
            return [self._made(e, values)]
        return self._loop(e, values, rest, hold) if e.doors else self._passed_on(e, values)

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands if e.index in self.makers else rest
        for i, v in enumerate(e.outs):
            if (e.index, i) in self.loop_sums:
                yield from gradient_sum(self.layout, v, self._axes, e.trips)

    def lies(self, value: Value) -> Spec | None:
        return [self._axes, *self._whole(value)] if value in self.values else None

    def _pin(self, x: Any, value: Value) -> Any:
        """`x`, the parts of `value`, each on its own shard."""
        return self.layout.pin(x, [self._axes, *self._whole(value)])

    def _loop(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        """A carry in parts starts so, and is summed after the last trip unless the rest of the step waits as well."""
        n, k = scan_counts(e.params)
        for i, v in enumerate(e.doors[0].scope.ins[n : n + k], n):
            if v in self.values and e.ins[i] not in self.values:
                values[i] = self._spread(values[i], v)
        outs = rest(values)
        for i, v in enumerate(e.outs):
            if i >= k and v in self.values:  # what a loop stacked has its trips first
                outs[i] = self._pin(jnp.moveaxis(outs[i], 1, 0), v)
            elif (e.index, i) in self.loop_sums:
                loop_sum = self.loop_sums[e.index, i]
                with hold.at(loop_sum.path):
                    dtype = sum_type(self.sum_dtype, outs[i].dtype, gradient=loop_sum.gradient)
                    outs[i] = self.reduced(outs[i], v, dtype)
        return outs

    def _made(self, e: Equation, values: list) -> Any:
        """What `e`, which sums over the batch, gives on every shard from its own examples."""
        dims, specs = self.makers[e.index], []
        adds = e.primitive.scatters  # to its first operand, which is in parts like the result
        for k, (v, d) in enumerate(zip(e.ins, dims, strict=True)):
            rank = 0 if v is None else len(self.layout.program.shapes[v])
            spec: Spec = [self._axes if i == d else () for i in range(rank)]
            specs.append(partition_spec([self._axes, *spec] if adds and k == 0 else spec))
        if adds and e.ins[0] not in self.values:
            values = [self._spread(values[0], e.outs[0]), *values[1:]]

        def on_shard(*operands):
            first = operands[0][0] if adds else operands[0]
            return bind(e.eqn, [first, *operands[1:]])[0][None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=tuple(specs),
            out_specs=partition_spec([self._axes]),
            axis_names=set(self._axes),
            check_vma=False,
        )
        return self._pin(parts(*values), e.outs[0])

    def _passed_on(self, e: Equation, values: list) -> list:
        """The results of the linear equation `e`, in parts, some of whose operands are."""
        parted = {k for k in summands(e) if e.ins[k] in self.values}
        if joint(e):
            for k in set(summands(e)) - parted:
                values[k] = self._spread(values[k], e.ins[k])
            parted = set(summands(e))
        in_axes = [0 if k in parted else None for k in range(len(values))]
        outs = jax.vmap(lambda *xs: bind(e.eqn, list(xs)), in_axes)(*values)
        return [self._pin(x, v) for x, v in zip(outs, e.outs, strict=True)]

    def _spread(self, x: Any, value: Value | None) -> Any:
        """A whole array as parts: each device has what it stores of `value` and zeros elsewhere, and of several that
        store the same the first has it."""
        x = jnp.asarray(x)
        whole = self._whole(value) if value is not None else []
        scattered = self._stored(value, whole) if value is not None else []
        if value is None or not any(scattered):
            shard = lax.broadcasted_iota(jnp.int32, (self.layout.count(self._axes), *x.shape), 0)
            parts = jnp.where(shard == 0, x[None], jnp.zeros((), x.dtype))
            return parts if value is None else self._pin(parts, value)

        def on_shard(part):
            for d, axes in enumerate(scattered):
                if axes:
                    size = part.shape[d]
                    shape = (*part.shape[:d], size * self.layout.count(axes), *part.shape[d + 1 :])
                    start = lax.axis_index(axes) * size
                    part = lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), part, start, d)
            rest = self._rest(scattered)
            return (jnp.where(lax.axis_index(rest) == 0, part, 0) if rest else part)[None]

        parts = jax.shard_map(
            on_shard,
            mesh=self.layout.mesh,
            in_specs=_joined(whole, scattered),
            out_specs=partition_spec([self._axes, *whole]),
            check_vma=False,
        )(x)
        return self._pin(parts, value)

    def reduced(self, x: Any, value: Value, dtype: Any) -> Any:
        """The sum of the parts, added up in `dtype`, each device holding what it stores of `value`.

        All axes are manual: over an automatic one the compiler would gather.
        """
        layout, whole, own = self.layout, self._whole(value), x.dtype
        # XLA for the CPU aborts on a sum in bfloat16; whole numbers stay so, float32 does not hold them all
        wire = jnp.promote_types(dtype, jnp.float32) if layout.simulated and is_float(dtype) else dtype
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
        return layout.pin(total, layout.at_rest(value))

    def _rest(self, scattered: Spec) -> Axes:
        """The batch axes along which devices store the same."""
        return tuple(a for a in self._axes if not any(a in axes for axes in scattered))

    def _whole(self, value: Value) -> Spec:
        """What divides a part, never the axes that the parts lie along: what it is stored over, so that it need not
        move for that, or what tensor parallelism divides where it is stored whole."""
        specs = self.layout.at_rest(value), self.layout.in_use(value)
        stored, used = (without(spec, self._axes) for spec in specs)
        return stored if any(stored) else used

    def _stored(self, value: Value, whole: Spec) -> Spec:
        """The batch axes that each dimension of `value` is stored over, where it divides over all of them."""
        layout, spec = self.layout, []
        sizes = layout.program.shapes[value]
        for size, used, stored in zip(sizes, whole, layout.at_rest(value), strict=True):
            axes: Axes = tuple(a for a in stored if a in self._axes)
            spec.append(axes if size % layout.count((*used, *axes)) == 0 else ())
        return spec


def _joined(first: Spec, then: Spec) -> PartitionSpec:
    return partition_spec([(*a, *b) for a, b in zip(first, then, strict=True)])


def unreduced(context: Context) -> Unreduced:
    """The sums that wait for the end of a loop, or for whoever takes outputs in parts."""
    layout, deferred = context.layout, context.deferred
    members = {*deferred.makers}
    for e in layout.program.equations if deferred.values else ():
        ends = (
            (v for door in e.doors for v in (*door.scope.ins, *door.scope.outs)) if e.name == "scan" else ()
        )
        if not deferred.values.isdisjoint(ends if e.doors else e.outs):
            members.add(e.index)
    loop_sums = _loop_sums(context, deferred)
    return Unreduced(members, layout, deferred.values, deferred.makers, loop_sums, context.sum_dtype)


def _loop_sums(context: Context, deferred: Deferred) -> dict[tuple[int, int], LoopSum]:
    """What loops add up in parts and the rest of the step needs whole. An equation whose gradient is known by its label
    is a better path than another."""
    flow, program = context.layout.flow, context.layout.program
    sums: dict[tuple[int, int], LoopSum] = {}
    if not deferred.makers:
        return sums
    made_by = {program.equations[i].outs[0]: program.equations[i] for i in deferred.makers}
    phase = context.phases

    def rank(e: Equation) -> tuple[bool, bool]:
        return not context.labels.get(e.index, "").startswith(GRADIENT), phase.get(e.index) != BACKWARD

    for e in (e for e in program.equations if e.name == "scan"):
        for k, (inside, outside, _) in enumerate(e.doors[0].out):
            if inside in deferred.values and outside not in deferred.values:
                before = flow.back([inside], lambda _v, w, _e: w in deferred.values)
                maker = min((made_by[v] for v in before if v in made_by), key=rank)
                path = [maker]
                while (outer := path[0].outer) is not e and outer is not None:
                    path.insert(0, outer)
                sums[e.index, k] = LoopSum(tuple(path), phase.get(maker.index) == BACKWARD)
    return sums
