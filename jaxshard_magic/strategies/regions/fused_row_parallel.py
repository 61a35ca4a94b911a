"""Sums of row-parallel products, reduced once for all their terms.

The input gradient of weights with a common input (q, k and v; gate and up) is a sum of products that each contract a
tensor-parallel dimension. XLA may reduce every product, since two sums over a sharded dimension that are added
afterwards are two reductions; one all-reduce of their sum is enough (the operator f of Shoeybi et al. 2019, figure 3).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import PlannedCollective
from ...program.ir import Equation, Value
from ...program.primitives import bind
from ...program.xla_faults import bind_with_workaround
from ..layout import Axes, Layout, Spec, partition_spec
from ..reductions import activation_reductions
from ..sp import operand_specs, scatter_dim
from .region import Context, Emission, Region


@dataclass(frozen=True)
class ProductTerm:
    """One product of a sum.

    Attributes:
        product: The `dot_general`.
        operands: Its operands, gathered for use.
        casts: Casts applied to the result.
    """

    product: Equation
    operands: tuple[Any, ...]
    casts: tuple[Equation, ...] = ()

    def compute(self, operands: tuple[Any, ...], *, cpu: bool) -> Any:
        """Compute the term on one device.

        Args:
            operands: The device's shards of the operands.
            cpu: Whether the device is a CPU device.
        """
        out = bind_with_workaround(self.product, list(operands), lambda _d: False, cpu=cpu)
        for cast in self.casts:
            out = bind(cast.jaxpr_eqn, out)
        return out[0]


@dataclass(frozen=True)
class UnreducedSum:
    """Sum that is not reduced yet.

    Attributes:
        terms: Products not yet reduced over the tensor axes.
        reduced_terms: Arrays that need no reduction.
    """

    terms: tuple[ProductTerm, ...]
    reduced_terms: tuple[Any, ...] = ()

    def cast(self, e: Equation) -> "UnreducedSum":
        terms = tuple(ProductTerm(t.product, t.operands, (*t.casts, e)) for t in self.terms)
        return UnreducedSum(terms, tuple(bind(e.jaxpr_eqn, [w])[0] for w in self.reduced_terms))


@dataclass(frozen=True)
class _RowParallelSum:
    axes: Axes
    equations: tuple[Equation, ...]

    @property
    def product_count(self) -> int:
        return sum(e.name == "dot_general" for e in self.equations)


@dataclass(frozen=True, eq=False)
class FusedRowParallel(Region):
    """Sums of products that contract tensor-parallel dimensions.

    Attributes:
        layout: The layout.
        axes_by_root: Mesh axes of each sum, by the index of its last equation, which reduces it. The other members pass
            on an `UnreducedSum`.
    """

    layout: Layout
    axes_by_root: Mapping[int, Axes]

    def emit(self, e: Equation, values: list, default: Callable[[list], list], lowering: Emission) -> list:
        partial = self._accumulate(e, lowering.before(e, values))
        if e.index not in self.axes_by_root:
            return [partial]
        total = self._reduce(e, partial)
        for spec in self.layout.result_specs(e, e.results[0]):
            total = self.layout.constrain(total, spec)
        return [total]

    def collectives(
        self, e: Equation, operand_collectives: Iterable[PlannedCollective], default: Iterable[PlannedCollective]
    ) -> Iterable[PlannedCollective]:
        yield from operand_collectives
        if e.index in self.axes_by_root:
            yield from activation_reductions(
                self.layout, e.results[0], self.axes_by_root[e.index], e.trip_count, in_shard_map=True
            )

    def _accumulate(self, e: Equation, values: list) -> UnreducedSum:
        """Return the sum so far, from the operands of `e`."""
        if e.name == "dot_general":
            return UnreducedSum((ProductTerm(e, tuple(values)),))
        if e.primitive.changes_dtype:
            return values[0].cast(e)
        parts = [v if isinstance(v, UnreducedSum) else UnreducedSum((), (v,)) for v in values]
        return UnreducedSum(tuple(t for p in parts for t in p.terms), tuple(w for p in parts for w in p.reduced_terms))

    def _reduce(self, e: Equation, partial: UnreducedSum) -> Any:
        """Reduce a sum once over the tensor axes at its last equation; scattered where positions are sharded over these
        axes."""
        axes, terms, layout = self.axes_by_root[e.index], partial.terms, self.layout
        d, simulated = scatter_dim(layout, e.results[0], axes), layout.is_cpu

        def local(*operands):
            pairs = zip(operands[::2], operands[1::2], strict=True)
            values = [t.compute(pair, cpu=simulated) for t, pair in zip(terms, pairs, strict=True)]
            total = values[0]
            for v in values[1:]:
                total = lax.add(total, v)
            dtype = total.dtype
            # XLA for the CPU aborts on a sum in bfloat16.
            if simulated and dtype == jnp.bfloat16:
                total = total.astype(jnp.float32)
            if d is None:
                return lax.psum(total, axes).astype(dtype)
            return lax.psum_scatter(total, axes, scatter_dimension=d, tiled=True).astype(dtype)

        if d is None:
            operands = [v for t in terms for v in t.product.operands if v is not None]
            specs, out = [_restricted_spec(layout, v, axes) for v in operands], []
        else:
            # All axes are manual: over an automatic one XLA may gather in order to scatter over these.
            out = layout.activation_spec(e.results[0])
            unscattered = [has[: -len(axes)] if k == d else has for k, has in enumerate(out)]
            specs = [s for t in terms for s in operand_specs(layout, t.product, unscattered, axes)]
        # Outside of a `shard_map` XLA reduces each product by itself.
        reduced = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=tuple(map(partition_spec, specs)),
            out_specs=partition_spec(out),
            axis_names=set(axes) if d is None else set(layout.mesh.axis_names),
            # With all axes manual, examples vary over axes over which weights do not, which this check refuses.
            check_vma=d is None,
        )
        total = reduced(*(x for t in terms for x in t.operands))
        for whole in partial.reduced_terms:
            total = lax.add(total, whole)
        return total


def find_fused_row_parallel(context: Context) -> FusedRowParallel:
    """Find the sums of a step under tensor or sequence parallelism, with products that nothing else reads."""
    layout = context.layout
    sums: dict[Value, _RowParallelSum] = {}
    continued: set[Value] = set()
    for e in layout.program.equations if layout.tensor_class_axes or layout.position_classes else ():
        if (sum_so_far := _extend_sum(context, e, sums)) is not None:
            sums[e.results[0]] = sum_so_far
            continued.update(v for v in e.operands if v in sums)
    last = [s for v, s in sums.items() if v not in continued]
    worth = [w for s in last if (w := _useful_sum(layout, s)) is not None]
    members = {e.index for s in worth for e in s.equations}
    return FusedRowParallel(members, layout, {s.equations[-1].index: s.axes for s in worth})


def _extend_sum(context: Context, e: Equation, sums: dict[Value, _RowParallelSum]) -> _RowParallelSum | None:
    if e.name == "dot_general":
        axes = _contracted_axes(context.layout, e)
        return _RowParallelSum(axes, (e,)) if axes and context.layout.is_activation(e.results[0]) else None
    adds = e.primitive.is_elementwise and e.primitive.is_additive
    if not adds and not e.primitive.changes_dtype:
        return None
    terms = [sums[v] for v in e.operands if v in sums]
    # Another reader would find an `UnreducedSum` in place of an array.
    read_once = all(len(context.readers[v]) == 1 for v in e.operands if v in sums)
    if not read_once or None in e.operands or len({s.axes for s in terms}) != 1:
        return None
    return _RowParallelSum(terms[0].axes, (*(m for s in terms for m in s.equations), e))


def _useful_sum(layout: Layout, full_sum: _RowParallelSum) -> _RowParallelSum | None:
    """Return the sum if it has several products, or its product if that is scattered; else None."""
    if full_sum.product_count > 1:
        return full_sum
    product = full_sum.equations[0]
    # XLA reduces a single product as well, but does not scatter it on every platform.
    is_scattered = scatter_dim(layout, product.results[0], full_sum.axes) is not None
    return _RowParallelSum(full_sum.axes, (product,)) if is_scattered else None


def _contracted_axes(layout: Layout, e: Equation) -> Axes:
    """Return the tensor or sequence axes that shard both operands along a contracted dimension."""
    (left, right), c = e.operands, e.contraction
    if left is None or right is None or c is None:
        return ()
    inside = {x for axes in layout.tensor_class_axes.values() for x in axes} | {*layout.position_axes}
    a, b = _restricted_spec(layout, left, inside), _restricted_spec(layout, right, inside)
    return next((a[i] for i, j in c.contracted if a[i] and a[i] == b[j]), ())


def _restricted_spec(layout: Layout, value: Value, among: Collection[str]) -> Spec:
    return [tuple(x for x in axes if x in among) for axes in layout.spec_in_use(value)]
