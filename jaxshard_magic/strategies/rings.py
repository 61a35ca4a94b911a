"""Which attentions of a step are rings over its divided positions, and what each of them deals out by itself."""

from collections.abc import Iterable
from dataclasses import replace

from ..program.ir import Equation, Value
from ..program.permuted import first_mask
from ..program.primitives import shape_of
from ..program.unionfind import UnionFind
from .layout import Layout
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
    return not layout.simulated and e.name == "scan" and e.params["length"] == 1


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
