"""Which attentions of a step are rings over its divided positions, and what each of them deals out by itself."""

from collections.abc import Collection, Iterable
from dataclasses import replace

import jax.numpy as jnp

from ..program.ir import Equation, Value
from ..program.permuted import first_mask
from ..program.primitives import shape_of
from ..program.unionfind import UnionFind
from .changes import at_default, read_narrow
from .layout import Layout, Spec
from .ring import Ring, ring_of


def rings(layout: Layout) -> list[Equation]:
    """The attentions whose queries and keys are both divided over the axes of positions, and over nothing else."""
    return [e for e in layout.program.equations if _divided(layout, e)]


def ring(layout: Layout, e: Equation) -> Ring:
    """The ring of an attention."""
    axes, query = layout.sequence_axes, e.ins[0]
    assert query is not None
    masks = [shape_of(var) for var in e.eqn.invars[first_mask(e) :]]
    return ring_of(e.params["form"], axes, layout.count(axes), layout.program.shapes[query][-2], masks)


def in_dealt_order(found: Ring) -> Ring | None:
    """A ring whose positions are dealt out before it; None where it needs them in their order, as it stops before the
    last turn, or has arrays of queries and keys."""
    whole = found.turns == found.devices > 1 and not any(found.grids)
    even = found.positions % (2 * found.devices) == 0
    return replace(found, zigzag=True, dealt=True) if whole and even else None


def lying(layout: Layout, e: Equation) -> list[Spec]:
    """How the operands and the results of a ring lie: positions divided, but for those of masks that have no dimension
    of queries besides; examples and heads as elsewhere."""
    form, axes, at = e.params["form"], layout.sequence_axes, first_mask(e)
    lead, back = _lead(layout, e), is_gradient(e)
    rows: Spec = [*lead, axes]
    columns: Spec = [*lead[: form.batch], axes]
    operands = [[*rows, ()], [*columns, ()], [*columns, ()]]
    if back:
        operands += [[*rows, ()], rows, rows, rows]
    for grid, v, var in zip(ring(layout, e).grids, e.ins[at:], e.eqn.invars[at:], strict=True):
        sized = zip((*lead, (), ()), shape_of(var), strict=True)
        whole: Spec = [has if size > 1 and v is not None else () for has, size in sized]
        if grid:
            whole[-2] = axes
        operands.append(whole)
    results = operands[:3] if back else [[*rows, ()], rows, rows]
    return [*operands, *results]


def moving(layout: Layout, e: Equation) -> list[int]:
    """Bytes of the operands and the results of a ring on a device, on their way to others: what attention multiplies a
    TPU sends as it multiplies it."""
    values = (*e.ins, *e.outs)
    multiplied = range(4 if is_gradient(e) else 3)  # queries, keys, values, and the result's gradient
    default, sizes = at_default(*e.params["form"].precision), list[int]()
    for k, (v, spec) in enumerate(zip(values, lying(layout, e), strict=True)):
        if v is None:
            sizes.append(0)
            continue
        wide = layout.platform == "tpu" and layout.program.avals[v].dtype == jnp.float32
        narrow = default if k in multiplied else k >= len(e.ins) and read_narrow(layout, v, layout.active(v))
        sizes.append(layout.moving(v, spec) // (2 if wide and narrow else 1))
    return sizes


def dealt_by_itself(layout: Layout, e: Equation, brought: Collection[tuple[int, int]]) -> list[int]:
    """Bytes of what a ring deals out by itself, but for what is `brought`, and puts back."""
    if not ring(layout, e).zigzag:
        return []
    sizes = moving(layout, e)
    own = [size for k, size in enumerate(sizes[: first_mask(e)]) if (e.index, k) not in brought]
    return [*own, *sizes[len(e.ins) :]]


def there(layout: Layout, members: Iterable[Equation]) -> frozenset[tuple[int, int]]:
    """What several members of one body read, but for the first of them: XLA brings it once. Operands of masks are
    brought before they get their dimensions."""
    maker, known, found = layout.program.maker, set[tuple[int, bool, Value]](), set[tuple[int, int]]()
    joined = _joined(layout)
    for e in members:
        for k, v in enumerate(e.ins):
            if v is None:
                continue
            mask = k >= first_mask(e)
            while (
                mask
                and (made := maker.get(v)) is not None
                and made.primitive.alias
                and made.ins[0] is not None
            ):
                v = made.ins[0]
            key = id(_body(layout, e)), mask, joined.find(v)
            if key in known:
                found.add((e.index, k))
            known.add(key)
    return frozenset(found)


def _body(layout: Layout, e: Equation) -> Equation | None:
    """The equation in whose body `e` is compiled: a loop of one trip is none, but for XLA's for the CPU, where sums
    that keep the order of the ring keep it apart."""
    outer = e.outer
    while outer is not None and _one_trip(layout, outer):
        outer = outer.outer
    return outer


def _joined(layout: Layout) -> UnionFind:
    """Values that are one across the ends of such loops."""
    joined = UnionFind(len(layout.program.avals))
    for e in layout.program.equations:
        for door in e.doors if _one_trip(layout, e) else ():
            for a, b, _ in (*door.into, *door.out):
                if a is not None and b is not None:
                    joined.union(a, b)
    return joined


def _one_trip(layout: Layout, e: Equation) -> bool:
    return not layout.simulated and e.is_scan and e.params["length"] == 1


def is_gradient(e: Equation) -> bool:
    return e.name == "attention_gradient"


def _divided(layout: Layout, e: Equation) -> bool:
    if e.name not in ("attention", "attention_gradient") or not layout.sequence:
        return False
    query, key = e.ins[:2]
    assert query is not None and key is not None
    if not (layout.batchy(query) and layout.batchy(key)):
        return False
    axes = layout.sequence_axes
    same = layout.program.shapes[query][-2] == layout.program.shapes[key][-2]
    return same and layout.active(query)[-2] == axes == layout.active(key)[-2]


def _lead(layout: Layout, e: Equation) -> Spec:
    """How examples, heads and groups are divided."""
    form, query = e.params["form"], e.ins[0]
    assert query is not None
    spec = layout.active(query)[: form.batch + form.groups]
    return [tuple(a for a in axes if a not in layout.sequence_axes) for axes in spec]
