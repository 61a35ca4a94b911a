"""Products of which one mesh axis would divide two dimensions, such as rows and columns of a square weight.

A residual stream `x + f(x @ w)` has features that are rows of `w`, and its columns too: where an axis divides them, it
divides the rows of `w` alone, for an axis divides one dimension of an array. So the product with the transposed `w`, in
the backward pass, would add up over columns that the axis divides in the gradient and not in `w`. Rows of one matrix
that meet those of another (`a @ b.T` of a contrastive loss) are the same case.

The axis stays where most operands and the result have it, weights before activations; an activation that it divides
elsewhere is gathered for the product. Left alone, the compiler moves now the activation and now the weight.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from ..program.ir import Equation, Value
from ..program.primitives.contractions import Contraction
from .layout import Layout, Spec, without

Place = tuple[int, int]  # of a product: which of its operands, or 2 for its result; which dimension of that


def gather_contested(layout: Layout) -> None:
    """Have products read whole what an axis divides along one dimension while it divides another one of theirs.

    Adds to `layout.exchanges`; all strategies have filled in the layout before. Positions and experts that are divided
    are left to what divides them.
    """
    reads: dict[tuple[int, Value], Spec] = {}
    for e in layout.program.equations:
        if (c := e.contraction) is None or c.ragged is not None or not layout.storage.batchy_equation(e):
            continue
        for v, axes in _lost(layout, e, c).items():
            if (e.index, v) not in layout.exchanges.reads:
                reads[e.index, v] = without(layout.active(v), axes)
    layout.exchanges = replace(layout.exchanges, reads={**layout.exchanges.reads, **reads})


def _lost(layout: Layout, e: Equation, c: Contraction) -> dict[Value, set[str]]:
    """Return the activations that `e` reads, each with the axes over which it is gathered for that."""
    values = (*e.ins[:2], e.outs[0])
    specs = [layout.at(e, v) for v in values]
    others = {*layout.sequence_axes, *(layout.experts.axes if layout.experts is not None else ())}
    lost = defaultdict[Value, set[str]](set)
    for axis in {a for spec in specs for axes in spec for a in axes} - others:
        divided = [
            found
            for together in _together(c)
            if (found := [(k, d) for k, d in together if specs[k] and axis in specs[k][d]])
        ]
        if len(divided) < 2:
            continue
        kept = max(
            divided, key=lambda places: (any(not layout.batchy(values[k]) for k, _ in places), len(places))
        )
        for k, _ in (place for places in divided if places is not kept for place in places):
            if k < 2 and (v := values[k]) is not None and layout.batchy(v):
                lost[v].add(axis)
    return lost


def _together(c: Contraction) -> Iterator[tuple[Place, ...]]:
    """Yield the places of a product that are one dimension: none but these can be divided by an axis together."""
    yield from (((0, i), (1, j)) for i, j in c.contracted)
    yield from (((0, i), (1, j), (2, k)) for i, j, k in c.batch)
    yield from (((0, i), (2, k)) for i, k in c.left)
    yield from (((1, j), (2, k)) for j, k in c.right)
