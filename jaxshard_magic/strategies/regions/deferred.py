"""The analysis of which sums over the examples can wait until a loop has added them up before devices reduce them.

A sum over a divided batch is the sum of what each shard sums by itself, and what is linear can work on those parts. A
gradient that a loop adds up, over microbatches or over time, is then reduced once, after the loop, and not at every
trip. A value waits where each of its readers lets it, up to a loop's carry: a step without such a loop is reduced where
it always was, and never holds a whole gradient where it stores a share.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp

from ...program.flow import closure
from ...program.ir import Door, Equation, Program, Value
from ...program.primitives import called, scan_counts
from ..layout import Axes, Layout

BatchDims = tuple[int | None, ...]


@dataclass(frozen=True)
class Deferred:
    """`values`: those that are kept as one part per shard of the batch, to be summed later. `makers`: the equations
    that sum over the batch and make them, by index, with the batch dimension of each operand."""

    values: frozenset[Value] = frozenset()
    makers: Mapping[int, BatchDims] = field(default_factory=dict)


def find_deferred(layout: Layout, waiting: Collection[Value] = (), whole: Collection[Value] = ()) -> Deferred:
    """The sums of `layout`'s program that can wait for the end of a loop, or for somebody who takes the outputs
    `waiting` in parts; `whole` are values that can't."""
    if layout.count(layout.batch_axes) < 2:
        return Deferred()
    program = layout.program
    makers = {e.index: dims for e in program.equations if (dims := summed_batch(layout, e)) is not None}
    roots = {program.equations[i].outs[0] for i in makers}
    after = _linear_ways(layout, makers)
    kept, before = closure(roots, lambda v: after.get(v, ())), None
    while kept != before:
        before = kept
        kept = _agreed(program, makers, kept - {*whole}, {*waiting})
        kept = closure(roots & kept, lambda v: after.get(v, ()), kept)
    return Deferred(
        frozenset(kept), {i: d for i, d in makers.items() if program.equations[i].outs[0] in kept}
    )


def summands(e: Equation) -> range:
    """Which operands of a linear equation may be parts of a sum; empty for an equation that is not linear."""
    if e.primitive.in_each:
        return range(2)
    return range(len(e.ins))[e.primitive.linear or slice(0)]


def joint(e: Equation) -> bool:
    """Whether a linear equation needs all its `summands` as parts, or only one of them."""
    return not e.primitive.in_each


def summed_batch(layout: Layout, e: Equation) -> BatchDims | None:
    """The batch dimension of each operand of an equation that sums over the batch; None for every other."""
    batchy = [layout.batchy(v) for v in e.ins]
    if e.doors or not any(batchy) or any(layout.batchy(v) for v in e.outs):
        return None
    if not (axes := _added_along(layout, e)):
        return None
    dims = tuple(_batch_dim(layout, e, v, axes) if b else None for v, b in zip(e.ins, batchy, strict=True))
    if any(b and d is None for b, d in zip(batchy, dims, strict=True)):
        return None
    if (c := e.contraction) is not None:
        whole = e.params.get("batch_group_count", 1) == 1  # a grouped convolution is left to the compiler
        sums = whole and all(batchy[:2]) and dims[:2] in c.contracted and dims[0] != c.ragged
    elif e.primitive.reduces:
        sums = e.primitive.linear is not None and dims[0] in e.params["axes"]
    else:
        sums = e.primitive.scatters and e.primitive.adds and batchy == [False, True, True]
    return dims if sums else None


def _by_expert(layout: Layout, e: Equation) -> bool:
    return layout.experts is not None and e.index in layout.experts.equations


def _added_along(layout: Layout, e: Equation) -> Axes:
    """The batch axes along which devices add up what `e` makes; none where it works by expert and makes something of
    all of them, or the other way round: along some of these axes devices have other experts, not other examples."""
    axes = layout.adding(e.outs[0])
    return axes if _by_expert(layout, e) == (axes != layout.batch_axes) else ()


def _batch_dim(layout: Layout, e: Equation, value: Value | None, axes: Axes) -> int | None:
    """The one dimension of `value` that is the batch, or where `e` works by expert the places that stand for it, and
    divides over `axes`."""
    if value is None:
        return None
    shared = layout.experts.shared if layout.experts is not None and _by_expert(layout, e) else frozenset()
    examples = shared or layout.batch.classes - layout.sequence
    batch_dims = [d for d, c in enumerate(layout.dims.of(value)) if c in examples]
    size, n = layout.program.shapes[value], layout.count(axes)
    return batch_dims[0] if len(batch_dims) == 1 and size[batch_dims[0]] % n == 0 else None


def _linear(layout: Layout, e: Equation) -> bool:
    if not summands(e) or any(layout.batchy(v) for v in (*e.ins, *e.outs)):
        return False
    avals = layout.program.avals
    out = avals[e.outs[0]].dtype
    operands = [avals[v].dtype for k, v in enumerate(e.ins) if v is not None and k in summands(e)]
    if jnp.issubdtype(out, jnp.inexact):  # whole numbers become floats, and never booleans, which do not add
        return all(jnp.issubdtype(d, jnp.number) for d in operands)
    return e.name != "div" and all(jnp.issubdtype(d, jnp.integer) for d in (out, *operands))


def _linear_ways(layout: Layout, makers: Mapping[int, BatchDims]) -> dict[Value, list[Value]]:
    """Where the parts of a sum could go: from a value to those made from it. The start of a loop is no way into it:
    only what is summed inside makes waiting worth it."""
    after: dict[Value, list[Value]] = defaultdict(list)
    for e in layout.program.equations:
        if e.is_scan or called(e.eqn) is not None:
            for door in e.doors:
                ways = [(a, b) for a, b, _ in door.out] + door.loop
                ways += [] if e.is_scan else [(a, b) for a, b, _ in door.into]
                for a, b in ways:
                    if a is not None and b is not None:
                        after[a].append(b)
        elif e.index not in makers and _linear(layout, e):
            for k in summands(e):
                if (v := e.ins[k]) is not None and _in_as_many(layout, e, v):
                    after[v].extend(e.outs)
    return after


def _in_as_many(layout: Layout, e: Equation, v: Value) -> bool:
    """Are parts of `v` parts of what `e` makes of it?"""
    return all(layout.adding(v) == layout.adding(out) for out in e.outs)


def _agreed(
    program: Program, makers: Mapping[int, BatchDims], kept: set[Value], waiting: set[Value]
) -> set[Value]:
    """The most of `kept` that the equation which makes a value, and all that read it, let stay in parts."""
    kept = kept - (({*program.outputs} | _unread(program)) - waiting)
    touching: dict[Value, list[Equation]] = defaultdict(list)
    todo = []
    for e in program.equations:
        touched = kept.intersection(_ends(e))
        for v in touched:
            touching[v].append(e)
        if touched:
            todo.append(e)
    while todo:
        e = todo.pop()
        for v in kept.intersection(_refused(e, makers, kept)):
            kept.discard(v)
            todo.extend(touching[v])
    return kept


def _unread(program: Program) -> set[Value]:
    """Values that nothing reads, other than what a loop carries: its next value may do without the last."""
    read = {v for e in program.equations for v in e.ins}
    carried = set()
    for e in program.equations:
        for door in e.doors:
            read.update(door.scope.outs)
            carried.update(b for _, b in door.loop)
    return set(range(len(program.avals))) - read - carried


def _ends(e: Equation) -> list[Value | None]:
    """All values at an equation and just inside its bodies."""
    inside = (v for door in e.doors for v in (*door.scope.ins, *door.scope.outs))
    return [*e.ins, *e.outs, *inside]


def _refused(e: Equation, makers: Mapping[int, BatchDims], kept: set[Value]) -> Iterable[Value | None]:
    """What cannot stay in parts because of `e`."""
    if e.doors:
        if e.is_scan:
            return _refused_by_scan(e, e.doors[0], kept)
        if called(e.eqn) is None:
            return _ends(e)
        pairs = [(a, b) for a, b, _ in (*e.doors[0].into, *e.doors[0].out)]
        return [v for pair in pairs if not kept.issuperset(pair) for v in pair]
    if e.index in makers:
        return e.ins[1:] if e.primitive.scatters else e.ins
    parts = [k for k, v in enumerate(e.ins) if v in kept]
    fits = parts and kept.issuperset(e.outs) and set(parts) <= set(summands(e))
    return () if fits and (joint(e) or len(parts) == 1) else (*e.ins, *e.outs)


def _refused_by_scan(e: Equation, door: Door, kept: set[Value]) -> list[Value | None]:
    """Constants and slices come in whole. A carry is in parts at both ends of a trip or at none; after the loop it may
    go on in parts, or be reduced there. Stacked results are as what they are stacked from."""
    n, k = scan_counts(e.params)
    refused: list[Value | None] = []
    for i, (a, b, _) in enumerate(door.into):
        if not n <= i < n + k:
            refused += [a, b]
    for i, (inside, outside, _) in enumerate(door.out):
        if i >= k:
            refused += [] if kept.issuperset((inside, outside)) else [inside, outside]
        elif not kept.issuperset((inside, door.scope.ins[n + i])):
            refused += [e.ins[n + i], door.scope.ins[n + i], inside, outside]
    return refused
