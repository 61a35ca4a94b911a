"""Sums of row parallel products, reduced once for all their terms.

The input gradient of weights that share an input (q, k and v; gate and up) is a sum of products that each contract a
tensor parallel dimension. The compiler may reduce every one; theory needs one all-reduce of their sum (the operator f
of Shoeybi et al. 2019, figure 3).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ...plan import Sent
from ...program.ir import Equation, Value
from ...program.primitives import bind
from ...program.xla_faults import bind_mended
from ..layout import Axes, Layout, Spec, partition_spec
from ..reductions import activation_sum
from ..sp import operand_specs, scattered
from .region import Context, Emission, Region


@dataclass(frozen=True)
class Term:
    """One product of a sum, its operands as they are used, and the casts that follow it."""

    product: Equation
    operands: tuple[Any, ...]
    casts: tuple[Equation, ...] = ()

    def value(self, operands: tuple[Any, ...], *, cpu: bool) -> Any:
        """What it is of `operands`, those of one device, on a CPU device or another."""
        out = bind_mended(self.product, list(operands), lambda _d: False, cpu=cpu)
        for cast in self.casts:
            out = bind(cast.eqn, out)
        return out[0]


@dataclass(frozen=True)
class Partial:
    """A sum: `terms` that are not reduced over the tensor axes yet, and `wholes` that need not be."""

    terms: tuple[Term, ...]
    wholes: tuple[Any, ...] = ()

    def cast(self, e: Equation) -> "Partial":
        terms = tuple(Term(t.product, t.operands, (*t.casts, e)) for t in self.terms)
        return Partial(terms, tuple(bind(e.eqn, [w])[0] for w in self.wholes))


@dataclass(frozen=True)
class _Sum:
    axes: Axes
    equations: tuple[Equation, ...]

    @property
    def products(self) -> int:
        return sum(e.name == "dot_general" for e in self.equations)


@dataclass(frozen=True, eq=False)
class PartialSums(Region):
    """Sums of products that contract tensor parallel dimensions. `axes`: the mesh axes of each sum, by the index of its
    last equation, which reduces it; the others hand on what is there so far, a `Partial`."""

    layout: Layout
    axes: Mapping[int, Axes]

    def emit(self, e: Equation, values: list, rest: Callable[[list], list], hold: Emission) -> list:
        partial = self._joined(e, hold.before(e, values))
        if e.index not in self.axes:
            return [partial]
        total = self._reduced(e, partial)
        for spec in self.layout.made_by(e, e.outs[0]):
            total = self.layout.pin(total, spec)
        return [total]

    def sent(self, e: Equation, operands: Iterable[Sent], rest: Iterable[Sent]) -> Iterable[Sent]:
        yield from operands
        if e.index in self.axes:
            yield from activation_sum(self.layout, e.outs[0], self.axes[e.index], e.trips, by_hand=True)

    def _joined(self, e: Equation, values: list) -> Partial:
        """The sum so far; `values` are the operands of `e`, a product's as they are used."""
        if e.name == "dot_general":
            return Partial((Term(e, tuple(values)),))
        if e.primitive.casts:
            return values[0].cast(e)
        parts = [v if isinstance(v, Partial) else Partial((), (v,)) for v in values]
        return Partial(tuple(t for p in parts for t in p.terms), tuple(w for p in parts for w in p.wholes))

    def _reduced(self, e: Equation, partial: Partial) -> Any:
        """The sum of `partial`, reduced once over the tensor axes, at its root equation `e`; scattered where positions
        lie on these axes."""
        axes, terms, layout = self.axes[e.index], partial.terms, self.layout
        d, simulated = scattered(layout, e.outs[0], axes), layout.simulated

        def local(*operands):
            pairs = zip(operands[::2], operands[1::2], strict=True)
            values = [t.value(pair, cpu=simulated) for t, pair in zip(terms, pairs, strict=True)]
            total = values[0]
            for v in values[1:]:
                total = lax.add(total, v)
            dtype = total.dtype
            if simulated and dtype == jnp.bfloat16:  # XLA for the CPU aborts on such a sum
                total = total.astype(jnp.float32)
            if d is None:
                return lax.psum(total, axes).astype(dtype)
            return lax.psum_scatter(total, axes, scatter_dimension=d, tiled=True).astype(dtype)

        if d is None:
            operands = [v for t in terms for v in t.product.ins if v is not None]
            specs, out = [_manual(layout, v, axes) for v in operands], []
        else:  # all axes by hand: a compiler may gather what other axes divide to scatter over these
            out = layout.active(e.outs[0])
            unscattered = [has[: -len(axes)] if k == d else has for k, has in enumerate(out)]
            specs = [s for t in terms for s in operand_specs(layout, t.product, unscattered, axes)]
        reduced = jax.shard_map(
            local,
            mesh=layout.mesh,
            in_specs=tuple(map(partition_spec, specs)),
            out_specs=partition_spec(out),
            axis_names=set(axes) if d is None else set(layout.mesh.axis_names),
            check_vma=d is None,  # by hand, examples vary over axes that weights do not
        )
        total = reduced(*(x for t in terms for x in t.operands))
        for whole in partial.wholes:
            total = lax.add(total, whole)
        return total


def partial_sums(context: Context) -> PartialSums:
    """The sums of a step under tensor or sequence parallelism whose products nothing else reads."""
    layout = context.layout
    sums: dict[Value, _Sum] = {}
    continued: set[Value] = set()
    for e in layout.program.equations if layout.tensor or layout.sequence else ():
        if (sum_so_far := _sum(context, e, sums)) is not None:
            sums[e.outs[0]] = sum_so_far
            continued.update(v for v in e.ins if v in sums)
    last = [s for v, s in sums.items() if v not in continued]
    worth = [w for s in last if (w := _worth_a_sum(layout, s)) is not None]
    members = {e.index for s in worth for e in s.equations}
    return PartialSums(members, layout, {s.equations[-1].index: s.axes for s in worth})


def _sum(context: Context, e: Equation, sums: dict[Value, _Sum]) -> _Sum | None:
    if e.name == "dot_general":
        axes = _contracted(context.layout, e)
        return _Sum(axes, (e,)) if axes and context.layout.batchy(e.outs[0]) else None
    adds = e.primitive.elementwise and e.primitive.adds
    if not adds and not e.primitive.casts:
        return None
    terms = [sums[v] for v in e.ins if v in sums]
    single = all(len(context.readers[v]) == 1 for v in e.ins if v in sums)
    if not single or None in e.ins or len({s.axes for s in terms}) != 1:
        return None
    return _Sum(terms[0].axes, (*(m for s in terms for m in s.equations), e))


def _worth_a_sum(layout: Layout, whole: _Sum) -> _Sum | None:
    """The compiler reduces a product alone as well, but knows no scattering of it on every platform."""
    if whole.products > 1:
        return whole
    product = whole.equations[0]
    alone = scattered(layout, product.outs[0], whole.axes) is not None
    return _Sum(whole.axes, (product,)) if alone else None


def _contracted(layout: Layout, e: Equation) -> Axes:
    """The tensor or sequence axes that both operands are divided over along what is contracted."""
    (left, right), c = e.ins, e.contraction
    if left is None or right is None or c is None:
        return ()
    inside = {x for axes in layout.tensor.values() for x in axes} | {*layout.sequence_axes}
    a, b = _manual(layout, left, inside), _manual(layout, right, inside)
    return next((a[i] for i, j in c.contracted if a[i] and a[i] == b[j]), ())


def _manual(layout: Layout, value: Value, among: Collection[str]) -> Spec:
    return [tuple(x for x in axes if x in among) for axes in layout.used(value)]
