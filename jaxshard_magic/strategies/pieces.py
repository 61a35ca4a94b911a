"""A batch that a step takes piece by piece, as to add up gradients: where devices need all of it for that."""

from collections import defaultdict
from dataclasses import replace

from ..plan import Finding
from ..program.batching.follow import told
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without


def take_pieces_whole(layout: Layout) -> None:
    """Have a batch read whole where its pieces are such that each device needs rows of all others.

    That is so of pieces which the mesh axes that divide the batch do not divide. The compiler would divide something
    else in them, such as features, and add up activations; instead every device computes all of each piece, which is
    told. And it is so of pieces whose places are known only while the step runs. Adds to `layout.exchanges` and
    `layout.findings`.
    """
    cuts: dict[Value, list[tuple[Equation, Axes]]] = defaultdict(list)
    for e in layout.program.equations:
        if (gathered := _gathered(layout, e)) and (v := e.ins[0]) is not None:
            cuts[v].append((e, gathered))
    lies: dict[Value, Spec] = {}
    reads: dict[tuple[int, Value], Spec] = {}
    makes: dict[Value, Spec] = {}
    enters = _entrances(layout)
    undivided: list[tuple[Equation, Axes]] = []
    for v, pieces in cuts.items():
        if (
            sum(_rows(layout, e) * e.trips for e, _ in pieces)
            < layout.program.shapes[v][_examples(layout, v)]
        ):
            continue  # a few of its rows are looked at
        undivided += [(e, axes) for e, axes in pieces if set(axes) & set(_lost(layout, e))]
        whole = without(layout.between(v), [a for _, axes in pieces for a in axes])
        makes |= {out: layout.between(out) for e, _ in pieces for out in e.outs}
        readers = [e for e, _ in pieces]
        while v in enters:  # gathered before a loop, not in each of its trips
            lies[v] = whole
            reader, v = enters[v]
            readers = [reader]
        reads |= {(e.index, v): whole for e in readers}
    before = layout.exchanges
    layout.exchanges = replace(
        before, lies={**before.lies, **lies}, reads={**before.reads, **reads}, makes={**before.makes, **makes}
    )
    if undivided:
        layout.findings.append(_computed_by_all(layout, *undivided[0]))


def _gathered(layout: Layout, e: Equation) -> Axes:
    """The batch axes over which the operand of an equation that takes pieces of it is gathered."""
    v = e.ins[0] if e.primitive.cuts or e.primitive.factors else None
    if v is None or not layout.batchy(v) or layout.program.shapes[v] == layout.program.shapes[e.outs[0]]:
        return ()
    return _lost(layout, e) or _cut_somewhere(layout, e)


def _lost(layout: Layout, e: Equation) -> Axes:
    """The batch axes that divide an equation's operand and none of its results."""
    kept = {a for out in e.outs for axes in layout.between(out) for a in axes}
    return tuple(a for a in _dividing(layout, e.ins[0]) if a not in kept)


def _cut_somewhere(layout: Layout, e: Equation) -> Axes:
    """The batch axes that divide the examples of an operand of which an equation takes some at a place that is known
    only while the step runs."""
    v, out = e.ins[0], e.outs[0]
    if v is None or not e.primitive.cuts or len(e.ins) == 1:
        return ()
    d = _examples(layout, v)
    return _dividing(layout, v) if layout.program.shapes[v][d] != layout.program.shapes[out][d] else ()


def _dividing(layout: Layout, value: Value | None) -> Axes:
    """The batch axes that divide a value."""
    lies = [] if value is None else layout.between(value)
    return tuple(a for axes in lies for a in axes if a in layout.batch_axes)


def _entrances(layout: Layout) -> dict[Value, tuple[Equation, Value]]:
    """Where values enter a body unchanged, by what they are inside: the body's equation, and what they are outside."""
    counts, found = layout.flow.orders.counts, {}
    for e in layout.program.equations:
        for door in e.doors:
            for _, inside, _ in door.into:
                if (outside := counts.entering(inside)) is not None:
                    found[inside] = e, outside
    return found


def _examples(layout: Layout, value: Value) -> int:
    """The dimension of a value that counts examples."""
    return next(d for d, c in enumerate(layout.dims.of(value)) if c in layout.batch.classes)


def _rows(layout: Layout, e: Equation) -> int:
    """How many examples an equation gives at a time, all results together."""
    shapes, v = layout.program.shapes, e.ins[0]
    assert v is not None
    d = _examples(layout, v)
    return shapes[v][d] if e.primitive.factors else sum(shapes[out][d] for out in e.outs)


def _computed_by_all(layout: Layout, e: Equation, lost: Axes) -> Finding:
    """The warning of pieces that are not divided."""
    shapes, over, n = layout.program.shapes, "+".join(lost), layout.count(lost)
    v, out = e.ins[0], e.outs[0]
    assert v is not None
    whole, size = shapes[v][_examples(layout, v)], shapes[out][_examples(layout, out)]
    message = (
        f"{whole} examples are taken in pieces of {size} ({told(layout.program, e.index)}), which {over}={n} does not "
        f"divide: every device computes all of each piece. Pieces of {-(-size // n) * n} would be divided."
    )
    return Finding("pieces-not-divided", "warning", message)
