"""Rows sorted by expert: each shard of the batch sorts its own rows, so that no token moves for the sort.

Otherwise XLA gathers all tokens, as a sort needs all keys, and sums masked products of all tokens. Here sorted rows,
their lookups and their return stay on their shard, and products use the shard's rows of each group. With sharded
experts a product gathers the rows of all devices along the expert axes, which together have all experts, and multiplies
the rows of the device's own experts. The results return by a reduce-scatter; each row is nonzero on a single device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import PlannedCollective
from ...program.ir import Equation, Value
from ...program.op_labels import COMBINE, DISPATCH
from ...program.primitives import bind
from ...program.primitives.primitive import Kind
from ...program.primitives.sharding_rules import reduced_dims
from ...program.sizes import nbytes
from ...program.sort_states import ConstantValue
from ..expert_resident_rows import ExpertResidentRows, find_expert_resident_rows
from ..layout import Axes, Layout, Spec, partition_spec
from ..reductions import gradient_reductions
from ..shard_local_sorts import ShardLocalSorts, group_dim
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class SortedRows(Region):
    """Equations that sort rows, look them up and put them back, count groups and multiply by group.

    Attributes:
        layout: The layout.
        sorts: The sorts that each shard does by itself.
        expert_axes: Mesh axes of the experts; empty if each device has all.
        resident: Rows that stay with the experts between products.
    """

    layout: Layout
    sorts: ShardLocalSorts
    expert_axes: Axes
    resident: ExpertResidentRows

    @property
    def _batch_axes(self) -> Axes:
        return self.layout.batch_axes

    @cached_property
    def _local_equations(self) -> frozenset[int]:
        """Equations that sort, look up or multiply rows sorted by each shard; other rows may be sorted globally."""
        return self.sorts.equations()

    @property
    def _replica_axes(self) -> Axes:
        """Batch axes along which devices have the same experts."""
        return tuple(a for a in self._batch_axes if a not in self.expert_axes)

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        orders, sizes = self.sorts.analysis, self.sorts.group_sizes
        if e.index in self._local_equations:
            if e.index in orders.grouped_products:
                return self._multiply(e, values, lowering)
            return [self._look_up(e, values)] if e.index in orders.lookups else self._sort(e, values)
        if e.index in self.sorts.bias_lookups:
            return self._look_up_biases(e, values, lowering)
        if e.index in self.sorts.counters:
            return [self._count_groups(e, values)]
        if e.index in self.resident.equations:
            return self._compute_row_by_row(e, values)
        if not sizes.isdisjoint(e.results):
            return self._convert_sizes(e, values, default)
        if e.results and isinstance(state := orders.states.get(e.results[0]), ConstantValue):
            # The same number for all rows, so that their order does not matter.
            aval = self.layout.program.avals[e.results[0]]
            return [jnp.full(aval.shape, state.value, aval.dtype)]
        pairs = zip(values, e.operands, strict=True)
        # All other equations read the sizes summed over the shards.
        return default([x.sum(0, dtype=x.dtype) if v in sizes else x for x, v in pairs])

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        orders, avals = self.sorts.analysis, self.layout.program.avals
        if (
            e.index in self._local_equations and e.index in orders.grouped_products
        ) or e.index in self.sorts.bias_lookups:
            yield from self._product_collectives(e, operand_collectives) if self.expert_axes else default
        elif e.index in self.resident.equations:
            yield from self._row_reductions(e)
            if e.index in self.resident.returns_to_tokens:
                yield self._return_collective(e)
        elif not self._is_local(e):
            yield from default
            n = self.layout.device_count(self._batch_axes)
            for v in self.sorts.group_sizes.intersection(v for v in e.operands if v is not None):
                yield PlannedCollective("all-reduce", self._batch_axes, n, nbytes(avals[v]), e.trip_count)

    def finish_outputs(self, outs: list) -> list:
        """Return the outputs of the step with group sizes summed over the shards."""
        sizes, pairs = self.sorts.group_sizes, zip(self.layout.program.outputs, outs, strict=True)
        return [x.sum(0, dtype=x.dtype) if v in sizes else x for v, x in pairs]

    def output_collectives(self) -> Iterable[PlannedCollective]:
        n, avals = self.layout.device_count(self._batch_axes), self.layout.program.avals
        for v in self.sorts.group_sizes.intersection(v for v in self.layout.program.outputs if v is not None):
            yield PlannedCollective("all-reduce", self._batch_axes, n, nbytes(avals[v]), 1)

    def _product_collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        n, avals = self.layout.device_count(self.expert_axes), self.layout.program.avals
        yield from operand_collectives
        if e.index in self.resident.requests_group_sizes and (sizes := e.operands[2]) is not None:
            yield PlannedCollective("all-gather", self.expert_axes, n, nbytes(avals[sizes]) * n, e.trip_count)
        for v in self.resident.first_gathers[e.index]:
            yield PlannedCollective("all-gather", self.expert_axes, n, self._bytes_moved(v) * n, e.trip_count)
        yield from self._product_reductions(e)
        if e.index in self.resident.returns_to_tokens:
            yield self._return_collective(e)

    def _return_collective(self, e: Equation) -> PlannedCollective:
        n = self.layout.device_count(self.expert_axes)
        return PlannedCollective(
            "reduce-scatter", self.expert_axes, n, self._bytes_moved(e.results[0]) * n, e.trip_count
        )

    def _product_reductions(self, e: Equation) -> Iterable[PlannedCollective]:
        """Yield the reductions of a product with sharded experts, except for that of its rows over the experts."""
        out, c = e.results[0], e.contraction
        if self.sorts.sort_state(out) is None:
            yield from (
                gradient_reductions(self.layout, out, self._replica_axes, e.trip_count) if self._replica_axes else ()
            )
            return
        if c is None:
            return
        left, right = (self.layout.tensor_axes(v) for v in e.operands[:2] if v is not None)
        if over := tuple(a for i, j in c.contracted for a in left[i] if a in right[j]):
            size = self._bytes_moved(out) * self.layout.device_count(self.expert_axes)
            yield PlannedCollective("all-reduce", over, self.layout.device_count(over), size, e.trip_count)

    def _row_reductions(self, e: Equation) -> Iterable[PlannedCollective]:
        """Yield the reductions of resident rows over tensor-parallel dimensions."""
        if not e.primitive.is_combinable or e.operands[0] is None:
            return
        tensor_spec = self.layout.tensor_axes(e.operands[0])
        if over := tuple(a for d in reduced_dims(e.params) for a in tensor_spec[d]):
            size = self._bytes_moved(e.results[0]) * self.layout.device_count(self.expert_axes)
            yield PlannedCollective("all-reduce", over, self.layout.device_count(over), size, e.trip_count)

    def scratch_bytes(self, e: Equation, default: Callable[[], int]) -> int:
        n = self.layout.device_count(self.expert_axes)
        rows = ((v, self.layout.activation_spec(v)) for v in self.resident.first_gathers.get(e.index, ()))
        return sum(self.layout.shard_bytes(v, spec) for v, spec in rows) * n if n > 1 else default()

    def boundary_spec(self, value: Value) -> Spec | None:
        if value in self.sorts.group_sizes:
            return [self._batch_axes, ()]
        if value not in self.resident.values or (state := self.sorts.sort_state(value)) is None:
            return None
        tensor = enumerate(self.layout.tensor_axes(value))
        return [self.expert_axes, *(self._replica_axes if d == state.dim else has for d, has in tensor)]

    def _row_dim(self, v: Value | None) -> int | None:
        state = self.sorts.sort_state(v)
        return None if state is None else state.dim

    def _is_local(self, e: Equation) -> bool:
        """Return whether nothing is sent for `e`, which is no product."""
        by_itself = {*self.resident.equations, *self.sorts.counters, *self.sorts.row_number_equations}
        return e.index in self._local_equations | by_itself or not self.sorts.group_sizes.isdisjoint(e.results)

    def _needs_float32_sum(self, dtype: Any) -> bool:
        """Return whether a sum inside a `shard_map` needs float32: XLA for the CPU aborts on bfloat16."""
        return self.layout.is_cpu and dtype == jnp.bfloat16

    def _bytes_moved(self, v: Value) -> int:
        return self.layout.transfer_bytes(v, self.layout.activation_spec(v))

    # Equations local to a shard.

    def _shard_map(self, function: Callable[..., Any], specs: Sequence[Spec], outs: Sequence[Spec]) -> Any:
        axes = {a for spec in (*specs, *outs) for has in spec for a in has}
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=tuple(map(partition_spec, specs)),
            out_specs=tuple(map(partition_spec, outs)),
            axis_names={*self._batch_axes, *axes},
            check_vma=False,
        )

    def _spec_along(self, v: Value | None, dim: int | None, axes: Axes | None = None) -> Spec:
        """Return a spec with `axes` (by default the batch axes) on dimension `dim` alone."""
        rank = 0 if v is None else len(self.layout.program.shapes[v])
        return [(self._batch_axes if axes is None else axes) if d == dim else () for d in range(rank)]

    def _tensor_spec_along(self, v: Value | None, dim: int, axes: Axes) -> Spec:
        """Return a spec with rows over `axes` and tensor-parallel dimensions as in the layout."""
        # Left out of the spec, a tensor-parallel dimension would be gathered for a collective over `axes` alone.
        along = self._spec_along(v, dim, axes)
        return along if v is None else [a or b for a, b in zip(along, self.layout.tensor_axes(v), strict=True)]

    def _device_numbers(self, axes: Axes) -> Any:
        """Return the numbers of the devices along some axes, to be sharded over these."""
        # XLA has no `axis_index` where other axes are automatic, so that device numbers are passed in as an array.
        return jnp.arange(self.layout.device_count(axes), dtype=jnp.int32)

    def _sort(self, e: Equation, values: list) -> list:
        on_shards = self._shard_map(
            lambda *xs: tuple(bind(e.jaxpr_eqn, list(xs))),
            [self._spec_along(v, 0) for v in e.operands],
            [[self._batch_axes] for _ in e.results],
        )
        return list(on_shards(*values))

    def _look_up(self, e: Equation, values: list) -> Any:
        """Look rows up, or scatter them, by indices of the shard's own rows."""
        dn, scatters = e.params["dimension_numbers"], e.primitive.is_scatter
        (rows,) = dn.scatter_dims_to_operand_dims if scatters else dn.start_index_map
        window, row_values = (dn.update_window_dims, e.operands[2]) if scatters else (dn.offset_dims, e.results[0])
        assert row_values is not None and e.operands[1] is not None
        index_dim = self.sorts.row_state(e.operands[1]).dim
        row_dim = [d for d in range(len(self.layout.program.shapes[row_values])) if d not in window][index_dim]
        specs = [self._spec_along(e.operands[0], rows), self._spec_along(e.operands[1], index_dim)]
        specs += [self._spec_along(row_values, row_dim)] if scatters else []
        out = self._spec_along(e.results[0], rows if scatters else row_dim)

        def on_shard(shard, operand, index, *updates):
            first = shard[0].astype(index.dtype) * operand.shape[rows]
            return (bind(e.jaxpr_eqn, [operand, index - first, *updates])[0],)

        on_shards = self._shard_map(on_shard, [[self._batch_axes], *specs], [out])
        return on_shards(self._device_numbers(self._batch_axes), *map(jnp.asarray, values))[0]

    def _count_groups(self, e: Equation, values: list) -> Any:
        """Return the group sizes of each shard, as partial sums."""
        dims = self.sorts.counters[e.index]
        on_shards = self._shard_map(
            lambda *xs: (bind(e.jaxpr_eqn, list(xs))[0][None],),
            [self._spec_along(v, d) for v, d in zip(e.operands, dims, strict=True)],
            [[self._batch_axes, ()]],
        )
        return on_shards(*map(jnp.asarray, values))[0]

    def _convert_sizes(self, e: Equation, values: list, default: Callable[[list], list]) -> list:
        """Cast, reshape or pass on partial group sizes; other operands are equal for all shards."""
        sizes = self.sorts.group_sizes
        if e.primitive.kind is Kind.PASS_THROUGH:
            # Each result is an operand: partial sizes bypass the equation, which gets zeros of their own shape instead.
            unpartitioned = [
                jnp.zeros(x.shape[1:], x.dtype) if v in sizes else x for v, x in zip(e.operands, values, strict=True)
            ]
            made = default(unpartitioned)
            return [x if v in sizes else y for v, x, y in zip(e.operands, values, made, strict=True)]
        parts = [0 if v in sizes else None for v in e.operands]
        return list(jax.vmap(lambda *xs: tuple(bind(e.jaxpr_eqn, list(xs))), parts)(*values))

    # Products, biases and resident rows.

    def _multiply(self, e: Equation, values: list, lowering: Emission) -> list:
        """Multiply a shard's rows with all matrices or, with sharded experts, the rows of all devices along the expert
        axes with a device's own matrices."""
        out, inputs, specs = e.results[0], [], []
        dims = [self._row_dim(v) for v in (*e.operands[:2], out)]
        is_resident = [v in self.resident.values for v in e.operands[:2]]
        for k, x in enumerate(lowering.before(e, values)[:2]):
            v, dim = e.operands[k], dims[k]
            spec = (
                self._spec_along(v, group_dim(e, k), self.expert_axes)
                if dim is None
                else self._spec_along(v, dim, self._replica_axes)
            )
            if dim is not None and self.expert_axes and not is_resident[k]:
                x = self._gather_rows(x, v, dim)
            inputs.append(x)
            specs.append([self.expert_axes, *spec] if is_resident[k] else spec)
        # Without rows the result is the gradient of the matrices, one partial sum for each replica.
        if (row_dim := dims[2]) is None:
            out_spec = [self._replica_axes, *self._spec_along(out, group_dim(e, -1), self.expert_axes)]
        else:
            out_spec = self._spec_along(out, row_dim, self._replica_axes)
            out_spec = [self.expert_axes, *out_spec] if self.expert_axes else out_spec

        def on_shard(device, *operands):
            *rows, counts = (
                x[0] if is_apart else x for x, is_apart in zip(operands, [*is_resident, True], strict=True)
            )
            product = (
                partial(self._multiply_local_experts, e, dims, device[0])
                if self.expert_axes
                else partial(bind, e.jaxpr_eqn)
            )
            x = product([*rows, counts])[0]
            return (x[None] if len(out_spec) > x.ndim else x,)

        on_shards = self._shard_map(on_shard, [[self.expert_axes], *specs, [self._batch_axes, ()]], [out_spec])
        whole = on_shards(self._device_numbers(self.expert_axes), *inputs, values[2])[0]
        if row_dim is None:
            return lowering.after(e, [whole.sum(0, dtype=whole.dtype)])
        return [self._return_rows(e, whole)]

    def _multiply_local_experts(self, e: Equation, dims: Sequence[int | None], device: Any, operands: list) -> list:
        """Multiply the rows of a device's own experts; rows of other experts are zero in the result."""
        *inputs, counts = operands
        size = next(x.shape[d] for x, d in zip(inputs, dims, strict=False) if d is not None)
        own, order = order_local_experts_first(counts, self.expert_axes, device, size)
        inputs = [x if d is None else jnp.take(x, order, d) for x, d in zip(inputs, dims, strict=False)]
        made, dim = bind(e.jaxpr_eqn, [*inputs, own])[0], dims[2]
        if dim is None:
            return [made]
        is_local = lax.broadcasted_iota(own.dtype, made.shape, dim) < own.sum()
        return [jnp.take(jnp.where(is_local, made, 0), jnp.argsort(order), dim)]

    def _compute_row_by_row(self, e: Equation, values: list) -> list:
        """Compute results made of resident rows, each device its own."""
        in_axes = [0 if v in self.resident.values else None for v in e.operands]
        made = jax.vmap(lambda *xs: tuple(bind(e.jaxpr_eqn, list(xs))), in_axes)(*values)
        if len(made) == 1:
            return [self._return_rows(e, made[0])]
        return [self.layout.constrain(x, self.boundary_spec(v) or []) for x, v in zip(made, e.results, strict=True)]

    def _look_up_biases(self, e: Equation, values: list, lowering: Emission) -> list:
        """Look up the bias of each row in the experts' shard of a table, zero for rows of other experts.

        For the gradient, sum the rows into such a shard.
        """
        is_gradient, d, (table, index), out = (
            e.primitive.is_scatter,
            self.sorts.bias_lookups[e.index],
            e.operands[:2],
            e.results[0],
        )
        rows = e.operands[2] if is_gradient else out
        index_dim, row_dim, is_resident = (
            self._row_dim(index),
            self._row_dim(rows),
            is_gradient and rows in self.resident.values,
        )
        assert rows is not None and index_dim is not None and row_dim is not None
        rank = len(self.layout.program.shapes[rows])
        operands = [jnp.asarray(x) for x in lowering.before(e, values)]
        operands[1] = self._gather_rows(operands[1], index, index_dim)
        specs = [self._spec_along(table, d, self.expert_axes), self._spec_along(index, index_dim, self._replica_axes)]
        if is_gradient:
            operands[2] = operands[2] if is_resident else self._gather_rows(operands[2], rows, row_dim)
            specs.append([*([self.expert_axes] * is_resident), *self._spec_along(rows, row_dim, self._replica_axes)])
        lead, along = (
            (self._replica_axes, (d, self.expert_axes))
            if is_gradient
            else (self.expert_axes, (row_dim, self._replica_axes))
        )

        def on_shard(device, table, index, *updates):
            index = index - device[0].astype(index.dtype) * table.shape[d]
            own, last = (index >= 0) & (index < table.shape[d]), table.shape[d] - 1
            own = own.reshape([own.size if k == row_dim else 1 for k in range(rank)])
            updates = [jnp.where(own, x[0] if is_resident else x, 0) for x in updates]
            made = bind(e.jaxpr_eqn, [table, index.clip(0, last), *updates])[0]
            return ((made if is_gradient else jnp.where(own, made, 0))[None],)

        out_specs = [lead, *self._spec_along(out, *along)]
        whole = self._shard_map(on_shard, [[self.expert_axes], *specs], [out_specs])(
            self._device_numbers(self.expert_axes), *operands
        )[0]
        return lowering.after(e, [whole.sum(0, dtype=whole.dtype)]) if is_gradient else [self._return_rows(e, whole)]

    def _return_rows(self, e: Equation, rows: Any) -> Any:
        """Return rows as their readers need them: resident, or reduced to the devices of their tokens."""
        state, out = self.sorts.sort_state(e.results[0]), e.results[0]
        if not self.expert_axes or state is None:
            return rows
        dim = state.dim
        if e.index not in self.resident.returns_to_tokens:
            return self.layout.constrain(
                rows, self.boundary_spec(out) or [self.expert_axes, *self._spec_along(out, dim, self._replica_axes)]
            )

        def on_shard(part):
            x, dtype = part[0], part.dtype
            x = x.astype(jnp.float32) if self._needs_float32_sum(dtype) else x
            with jax.named_scope(COMBINE):
                total = lax.psum_scatter(x, self.expert_axes, scatter_dimension=dim, tiled=True)
            return (total.astype(dtype),)

        parts = [self.expert_axes, *self._tensor_spec_along(out, dim, self._replica_axes)]
        return self._shard_map(on_shard, [parts], [self._tensor_spec_along(out, dim, self._batch_axes)])(rows)[0]

    def _gather_rows(self, x: Any, v: Value | None, dim: int) -> Any:
        """Gather the rows of all devices along the expert axes."""

        def on_shard(own):
            with jax.named_scope(DISPATCH):
                return (lax.all_gather(own, self.expert_axes, axis=dim, tiled=True),)

        own, others = (self._tensor_spec_along(v, dim, axes) for axes in (self._batch_axes, self._replica_axes))
        return self._shard_map(on_shard, [own], [others])(x)[0]


def order_local_experts_first(counts: Any, axes: Axes, device: Any, rows: int) -> tuple[Any, Any]:
    """Return the number of rows of each local expert, and an order of all rows with those first, by expert.

    Args:
        counts: Group sizes of this device's rows, int32[groups].
        axes: Mesh axes of the experts.
        device: Number of this device along `axes`.
        rows: Number of rows of all devices along `axes`; each device's are sorted.
    """
    all_counts = lax.all_gather(counts, axes)  # (devices, groups)
    n, groups = all_counts.shape
    local_count = groups // n
    first = device.astype(counts.dtype) * local_count
    ends = jnp.cumsum(all_counts, axis=1)
    position = lax.broadcasted_iota(ends.dtype, (n, rows // n, groups), 1)
    # As many groups end at or before a row as there are groups before its own.
    group = jnp.sum(position >= ends[:, None], axis=2).reshape(-1) - first
    order = jnp.argsort(jnp.where((group >= 0) & (group < local_count), group, local_count), stable=True)
    return lax.dynamic_slice_in_dim(all_counts.sum(0, dtype=counts.dtype), first, local_count), order


def find_sorted_rows(context: Context) -> SortedRows:
    """Find the equations on rows that each shard of the batch sorts by itself."""
    layout, sorting = context.layout, context.layout.shard_local_sorts
    experts = () if layout.experts is None else layout.experts.axes
    if any(layout.compute_spec(v)[d] != experts for v, d in sorting.group_weights()):
        experts = ()
    away = find_expert_resident_rows(sorting) if experts else ExpertResidentRows()
    reads = {
        e.index for e in layout.program.equations if not e.bodies and not sorting.group_sizes.isdisjoint(e.operands)
    }
    members = sorting.equations() | sorting.row_number_equations | sorting.counters.keys() | reads | away.equations
    members |= sorting.bias_lookups.keys() if experts else frozenset()
    return SortedRows(members, layout, sorting, experts, away)
