"""Rows sorted by expert: each shard of the batch sorts its own, so that no token goes to another for that.

Without it the compiler gathers all tokens, as a sort needs all keys, and adds up masked products of all of them. What
is sorted, looked up by that and put back stays on its shard, and products meet the rows that the shard has of each
group. With experts divided, a product gathers the rows of the devices that share them, does those of its own experts,
and the results go back as a sum over the devices, of which one alone has each row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import Sent
from ...program.ir import Equation, Value
from ...program.labels import COMBINE, DISPATCH
from ...program.order_states import Known
from ...program.primitives import bind
from ...program.primitives.primitive import Kind
from ...program.primitives.sharding_rules import reduced
from ...program.sizes import nbytes
from ..away import Away, find_away
from ..layout import Axes, Layout, Spec, partition_spec
from ..reductions import gradient_sum
from ..sorting import Sorting, group_dim
from .region import Context, Emission, Region


@dataclass(frozen=True, eq=False)
class SortedRows(Region):
    """The equations that sort rows, look them up and put them back, count groups and multiply by group.

    `experts`: the mesh axes that experts are divided over, none where each device has all. `away`: the rows that stay
    with the experts between products.
    """

    layout: Layout
    sorting: Sorting
    experts: Axes
    away: Away

    @property
    def _batch(self) -> Axes:
        return self.layout.batch_axes

    @cached_property
    def _in_order(self) -> frozenset[int]:
        """The equations that sort, look up and multiply what each shard sorts by itself; others may be sorted whole."""
        return self.sorting.equations()

    @property
    def _others(self) -> Axes:
        """The batch axes whose devices have the same experts."""
        return tuple(a for a in self._batch if a not in self.experts)

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        orders, sizes = self.sorting.of, self.sorting.sizes
        if e.index in self._in_order:
            if e.index in orders.products:
                return self._multiplied(e, values, hold)
            return [self._looked_up(e, values)] if e.index in orders.lookups else self._sorted(e, values)
        if e.index in self.sorting.tables:
            return self._of_groups(e, values, hold)
        if e.index in self.sorting.counted:
            return [self._counted(e, values)]
        if e.index in self.away.equations:
            return self._row_by_row(e, values)
        if not sizes.isdisjoint(e.outs):
            return self._sizes_again(e, values, rest)
        if e.outs and isinstance(
            state := orders.of.get(e.outs[0]), Known
        ):  # the same for all rows, in whatever order
            aval = self.layout.program.avals[e.outs[0]]
            return [jnp.full(aval.shape, state.number, aval.dtype)]
        pairs = zip(values, e.ins, strict=True)
        return rest([x.sum(0, dtype=x.dtype) if v in sizes else x for x, v in pairs])

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        orders, avals = self.sorting.of, self.layout.program.avals
        if (e.index in self._in_order and e.index in orders.products) or e.index in self.sorting.tables:
            yield from self._sent_to_experts(e, operands) if self.experts else rest
        elif e.index in self.away.equations:
            yield from self._reduced(e)
            if e.index in self.away.back:
                yield self._sent_back(e)
        elif not self._is_local(e):
            yield from rest
            n = self.layout.count(self._batch)
            for v in self.sorting.sizes.intersection(v for v in e.ins if v is not None):
                yield Sent("all-reduce", self._batch, n, nbytes(avals[v]), e.trips)

    def leave(self, outs: list) -> list:
        """With the sizes of groups that the step returns, added up."""
        sizes, pairs = self.sorting.sizes, zip(self.layout.program.outputs, outs, strict=True)
        return [x.sum(0, dtype=x.dtype) if v in sizes else x for v, x in pairs]

    def sent_leaving(self) -> Iterable[Sent]:
        n, avals = self.layout.count(self._batch), self.layout.program.avals
        for v in self.sorting.sizes.intersection(v for v in self.layout.program.outputs if v is not None):
            yield Sent("all-reduce", self._batch, n, nbytes(avals[v]), 1)

    def _sent_to_experts(self, e: Equation, operands: Iterable[Sent]) -> Iterable[Sent]:
        n, avals = self.layout.count(self.experts), self.layout.program.avals
        yield from operands
        if e.index in self.away.asking and (sizes := e.ins[2]) is not None:
            yield Sent("all-gather", self.experts, n, nbytes(avals[sizes]) * n, e.trips)
        for v in self.away.brought[e.index]:
            yield Sent("all-gather", self.experts, n, self._moving(v) * n, e.trips)
        yield from self._summed(e)
        if e.index in self.away.back:
            yield self._sent_back(e)

    def _sent_back(self, e: Equation) -> Sent:
        n = self.layout.count(self.experts)
        return Sent("reduce-scatter", self.experts, n, self._moving(e.outs[0]) * n, e.trips)

    def _summed(self, e: Equation) -> Iterable[Sent]:
        """Sums of a product of divided experts, but for those of its rows over the experts."""
        out, c = e.outs[0], e.contraction
        if self.sorting.order(out) is None:
            yield from gradient_sum(self.layout, out, self._others, e.trips) if self._others else ()
            return
        if c is None:
            return
        left, right = (self.layout.tensor_axes(v) for v in e.ins[:2] if v is not None)
        if over := tuple(a for i, j in c.contracted for a in left[i] if a in right[j]):
            size = self._moving(out) * self.layout.count(self.experts)
            yield Sent("all-reduce", over, self.layout.count(over), size, e.trips)

    def _reduced(self, e: Equation) -> Iterable[Sent]:
        """What is summed of rows that are away over what tensor parallelism divides."""
        if not e.primitive.reduces or e.ins[0] is None:
            return
        lies = self.layout.tensor_axes(e.ins[0])
        if over := tuple(a for d in reduced(e.params) for a in lies[d]):
            size = self._moving(e.outs[0]) * self.layout.count(self.experts)
            yield Sent("all-reduce", over, self.layout.count(over), size, e.trips)

    def held(self, e: Equation, rest: Callable[[], int]) -> int:
        n = self.layout.count(self.experts)
        rows = ((v, self.layout.active(v)) for v in self.away.brought.get(e.index, ()))
        return sum(self.layout.bytes_of(v, spec) for v, spec in rows) * n if n > 1 else rest()

    def lies(self, value: Value) -> Spec | None:
        if value in self.sorting.sizes:
            return [self._batch, ()]
        if value not in self.away.values or (state := self.sorting.order(value)) is None:
            return None
        tensor = enumerate(self.layout.tensor_axes(value))
        return [self.experts, *(self._others if d == state.dim else has for d, has in tensor)]

    def _row_dim(self, v: Value | None) -> int | None:
        state = self.sorting.order(v)
        return None if state is None else state.dim

    def _is_local(self, e: Equation) -> bool:
        """Is nothing sent for `e`, which is no product?"""
        by_itself = {*self.away.equations, *self.sorting.counted, *self.sorting.numbers}
        return e.index in self._in_order | by_itself or not self.sorting.sizes.isdisjoint(e.outs)

    def _sums_wider(self, dtype: Any) -> bool:
        """XLA for the CPU aborts on a sum in bfloat16 by hand."""
        return self.layout.simulated and dtype == jnp.bfloat16

    def _moving(self, v: Value) -> int:
        return self.layout.moving(v, self.layout.active(v))

    # What stays on a shard.

    def _on_shards(self, function: Callable[..., Any], specs: Sequence[Spec], outs: Sequence[Spec]) -> Any:
        axes = {a for spec in (*specs, *outs) for has in spec for a in has}
        return jax.shard_map(
            function,
            mesh=self.layout.mesh,
            in_specs=tuple(map(partition_spec, specs)),
            out_specs=tuple(map(partition_spec, outs)),
            axis_names={*self._batch, *axes},
            check_vma=False,
        )

    def _along(self, v: Value | None, dim: int | None, axes: Axes | None = None) -> Spec:
        rank = 0 if v is None else len(self.layout.program.shapes[v])
        return [(self._batch if axes is None else axes) if d == dim else () for d in range(rank)]

    def _divided(self, v: Value | None, dim: int, axes: Axes) -> Spec:
        """Rows along `axes`, and what tensor parallelism divides as it does: the compiler would gather it for a
        collective over `axes` alone."""
        along = self._along(v, dim, axes)
        return (
            along if v is None else [a or b for a, b in zip(along, self.layout.tensor_axes(v), strict=True)]
        )

    def _numbers(self, axes: Axes) -> Any:
        """Of the devices along some axes, one on each: XLA knows no device's own where other axes are its to divide."""
        return jnp.arange(self.layout.count(axes), dtype=jnp.int32)

    def _sorted(self, e: Equation, values: list) -> list:
        on_shards = self._on_shards(
            lambda *xs: tuple(bind(e.eqn, list(xs))),
            [self._along(v, 0) for v in e.ins],
            [[self._batch] for _ in e.outs],
        )
        return list(on_shards(*values))

    def _looked_up(self, e: Equation, values: list) -> Any:
        """At the places that a shard's own rows have on it."""
        dn, scatters = e.params["dimension_numbers"], e.primitive.scatters
        (rows,) = dn.scatter_dims_to_operand_dims if scatters else dn.start_index_map
        window, moved = (dn.update_window_dims, e.ins[2]) if scatters else (dn.offset_dims, e.outs[0])
        assert moved is not None and e.ins[1] is not None
        place = self.sorting.row_state(e.ins[1]).dim
        spot = [d for d in range(len(self.layout.program.shapes[moved])) if d not in window][place]
        specs = [self._along(e.ins[0], rows), self._along(e.ins[1], place)]
        specs += [self._along(moved, spot)] if scatters else []
        out = self._along(e.outs[0], rows if scatters else spot)

        def on_shard(shard, operand, index, *updates):
            first = shard[0].astype(index.dtype) * operand.shape[rows]
            return (bind(e.eqn, [operand, index - first, *updates])[0],)

        on_shards = self._on_shards(on_shard, [[self._batch], *specs], [out])
        return on_shards(self._numbers(self._batch), *map(jnp.asarray, values))[0]

    def _counted(self, e: Equation, values: list) -> Any:
        """The sizes of the groups of each shard, as parts."""
        dims = self.sorting.counted[e.index]
        on_shards = self._on_shards(
            lambda *xs: (bind(e.eqn, list(xs))[0][None],),
            [self._along(v, d) for v, d in zip(e.ins, dims, strict=True)],
            [[self._batch, ()]],
        )
        return on_shards(*map(jnp.asarray, values))[0]

    def _sizes_again(self, e: Equation, values: list, rest: Callable[[list], list]) -> list:
        """Sizes under another type or shape, part by part; what is not in parts is the same for all of them."""
        sizes = self.sorting.sizes
        if e.primitive.kind is Kind.EACH:  # each result is an operand: parts as they are, others without them
            others = [
                jnp.zeros(x.shape[1:], x.dtype) if v in sizes else x
                for v, x in zip(e.ins, values, strict=True)
            ]
            made = rest(others)
            return [x if v in sizes else y for v, x, y in zip(e.ins, values, made, strict=True)]
        parts = [0 if v in sizes else None for v in e.ins]
        return list(jax.vmap(lambda *xs: tuple(bind(e.eqn, list(xs))), parts)(*values))

    # Products, and what works on their rows where experts are divided.

    def _multiplied(self, e: Equation, values: list, hold: Emission) -> list:
        """Of a shard's rows with all matrices, or of the rows of all shards that share experts with its own of them."""
        out, sides, specs = e.outs[0], [], []
        dims = [self._row_dim(v) for v in (*e.ins[:2], out)]
        apart = [v in self.away.values for v in e.ins[:2]]
        for k, x in enumerate(hold.before(e, values)[:2]):
            v, dim = e.ins[k], dims[k]
            spec = (
                self._along(v, group_dim(e, k), self.experts)
                if dim is None
                else self._along(v, dim, self._others)
            )
            if dim is not None and self.experts and not apart[k]:
                x = self._brought(x, v, dim)
            sides.append(x)
            specs.append([self.experts, *spec] if apart[k] else spec)
        if (made := dims[2]) is None:  # the gradient of matrices
            lies = [self._others, *self._along(out, group_dim(e, -1), self.experts)]
        else:
            lies = self._along(out, made, self._others)
            lies = [self.experts, *lies] if self.experts else lies

        def on_shard(device, *operands):
            *rows, counts = (
                x[0] if is_apart else x for x, is_apart in zip(operands, [*apart, True], strict=True)
            )
            product = partial(self._of_own, e, dims, device[0]) if self.experts else partial(bind, e.eqn)
            x = product([*rows, counts])[0]
            return (x[None] if len(lies) > x.ndim else x,)

        on_shards = self._on_shards(on_shard, [[self.experts], *specs, [self._batch, ()]], [lies])
        whole = on_shards(self._numbers(self.experts), *sides, values[2])[0]
        if made is None:
            return hold.after(e, [whole.sum(0, dtype=whole.dtype)])
        return [self._back(e, whole)]

    def _of_own(self, e: Equation, dims: Sequence[int | None], device: Any, operands: list) -> list:
        """A product of the rows of a device's own experts, of all that the devices that share them have; rows that it
        makes of others are zero."""
        *sides, counts = operands
        size = next(x.shape[d] for x, d in zip(sides, dims, strict=False) if d is not None)
        own, order = own_first(counts, self.experts, device, size)
        sides = [x if d is None else jnp.take(x, order, d) for x, d in zip(sides, dims, strict=False)]
        made, dim = bind(e.eqn, [*sides, own])[0], dims[2]
        if dim is None:
            return [made]
        ours = lax.broadcasted_iota(own.dtype, made.shape, dim) < own.sum()
        return [jnp.take(jnp.where(ours, made, 0), jnp.argsort(order), dim)]

    def _row_by_row(self, e: Equation, values: list) -> list:
        """What is made of rows that are away, each device's by itself."""
        in_axes = [0 if v in self.away.values else None for v in e.ins]
        made = jax.vmap(lambda *xs: tuple(bind(e.eqn, list(xs))), in_axes)(*values)
        if len(made) == 1:
            return [self._back(e, made[0])]
        return [self.layout.pin(x, self.lies(v) or []) for x, v in zip(made, e.outs, strict=True)]

    def _of_groups(self, e: Equation, values: list, hold: Emission) -> list:
        """What each row looks up for its group in the part of a table that its experts' device has, zero for those of
        others; or the sum, in such a part, of the gradients of that."""
        sums, d, (table, index), out = (
            e.primitive.scatters,
            self.sorting.tables[e.index],
            e.ins[:2],
            e.outs[0],
        )
        rows = e.ins[2] if sums else out
        place, spot, apart = self._row_dim(index), self._row_dim(rows), sums and rows in self.away.values
        assert rows is not None and place is not None and spot is not None
        rank = len(self.layout.program.shapes[rows])
        operands = [jnp.asarray(x) for x in hold.before(e, values)]
        operands[1] = self._brought(operands[1], index, place)
        specs = [self._along(table, d, self.experts), self._along(index, place, self._others)]
        if sums:
            operands[2] = operands[2] if apart else self._brought(operands[2], rows, spot)
            specs.append([*([self.experts] * apart), *self._along(rows, spot, self._others)])
        lead, along = (self._others, (d, self.experts)) if sums else (self.experts, (spot, self._others))

        def on_shard(device, table, index, *updates):
            index = index - device[0].astype(index.dtype) * table.shape[d]
            own, last = (index >= 0) & (index < table.shape[d]), table.shape[d] - 1
            own = own.reshape([own.size if k == spot else 1 for k in range(rank)])
            updates = [jnp.where(own, x[0] if apart else x, 0) for x in updates]
            made = bind(e.eqn, [table, index.clip(0, last), *updates])[0]
            return ((made if sums else jnp.where(own, made, 0))[None],)

        lies = [lead, *self._along(out, *along)]
        whole = self._on_shards(on_shard, [[self.experts], *specs], [lies])(
            self._numbers(self.experts), *operands
        )[0]
        return hold.after(e, [whole.sum(0, dtype=whole.dtype)]) if sums else [self._back(e, whole)]

    def _back(self, e: Equation, made: Any) -> Any:
        """Rows as they are wanted: away, or on the devices of their tokens, which add up what all experts' made."""
        state, out = self.sorting.order(e.outs[0]), e.outs[0]
        if not self.experts or state is None:
            return made
        dim = state.dim
        if e.index not in self.away.back:
            return self.layout.pin(
                made, self.lies(out) or [self.experts, *self._along(out, dim, self._others)]
            )

        def on_shard(part):
            x, dtype = part[0], part.dtype
            x = x.astype(jnp.float32) if self._sums_wider(dtype) else x
            with jax.named_scope(COMBINE):
                total = lax.psum_scatter(x, self.experts, scatter_dimension=dim, tiled=True)
            return (total.astype(dtype),)

        parts = [self.experts, *self._divided(out, dim, self._others)]
        return self._on_shards(on_shard, [parts], [self._divided(out, dim, self._batch)])(made)[0]

    def _brought(self, x: Any, v: Value | None, dim: int) -> Any:
        """The rows of all devices that share the experts."""

        def on_shard(own):
            with jax.named_scope(DISPATCH):
                return (lax.all_gather(own, self.experts, axis=dim, tiled=True),)

        own, others = (self._divided(v, dim, axes) for axes in (self._batch, self._others))
        return self._on_shards(on_shard, [own], [others])(x)[0]


def own_first(counts: Any, axes: Axes, device: Any, rows: int) -> tuple[Any, Any]:
    """How many rows a device's own experts have, and all rows with theirs first, in the order of the experts.

    `counts`: of the groups of the rows of this device, the `device`-th along `axes`, int32[groups]; `rows`: of all of
    these together, each device's sorted.
    """
    all_counts = lax.all_gather(counts, axes)  # (devices, groups)
    n, groups = all_counts.shape
    own = groups // n
    first = device.astype(counts.dtype) * own
    ends = jnp.cumsum(all_counts, axis=1)
    place = lax.broadcasted_iota(ends.dtype, (n, rows // n, groups), 1)
    group = jnp.sum(place >= ends[:, None], axis=2).reshape(-1) - first
    order = jnp.argsort(jnp.where((group >= 0) & (group < own), group, own), stable=True)
    return lax.dynamic_slice_in_dim(all_counts.sum(0, dtype=counts.dtype), first, own), order


def sorted_rows(context: Context) -> SortedRows:
    """What each shard of the batch sorts by itself."""
    layout, sorting = context.layout, context.layout.sorting
    experts = () if layout.experts is None else layout.experts.axes
    if any(layout.in_use(v)[d] != experts for v, d in sorting.weights()):
        experts = ()
    away = find_away(sorting) if experts else Away()
    reads = {e.index for e in layout.program.equations if not e.doors and not sorting.sizes.isdisjoint(e.ins)}
    members = sorting.equations() | sorting.numbers | sorting.counted.keys() | reads | away.equations
    members |= sorting.tables.keys() if experts else frozenset()
    return SortedRows(members, layout, sorting, experts, away)
