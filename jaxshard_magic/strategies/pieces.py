"""Values that a step takes apart, or puts together, along a dimension that devices divide.

A batch in pieces, to add up gradients; a fused weight's result, split into q, k and v; two views, one after the other.
The parts do not lie where the plan has them. Left alone, the compiler shifts what overlaps, a collective for each part
and each distance, or gathers everything. Here the value is dealt out over another of its dimensions (one all-to-all),
taken apart on each device, and the parts are dealt out again.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..plan import Finding
from ..program.batching.follow import told
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without


@dataclass(frozen=True)
class _Apart:
    """An equation that takes values apart along dimensions that the mesh axes `over` divide, or puts them together.

    `ends`: its operands and results that have such a dimension, each with those. `lost`: whether a result is not
    divided by the axes at all. `rows`: how much of the dimension its results have, all together.
    """

    equation: Equation
    over: Axes
    ends: Mapping[Value, frozenset[int]]
    lost: bool
    rows: float

    @property
    def somewhere(self) -> bool:
        """Return whether the place of what it takes is known only while the step runs: compilers gather all for it."""
        return self.equation.primitive.part and len(self.equation.ins) > 1


def take_apart(layout: Layout) -> None:
    """Have values whole along the dimensions that they are taken apart along, or put together, where that is done.

    Where the axes divide no part, every device makes all of each part, and that is told. Adds to `layout.exchanges` and
    `layout.findings`; all strategies have filled in the layout before.
    """
    found: dict[Value, list[_Apart]] = defaultdict(list)
    for e in layout.program.equations:
        if (apart := _apart(layout, e)) is not None:
            found[next(iter(apart.ends))].append(apart)
    if not found:
        return
    lies: dict[Value, Spec] = {}
    reads: dict[tuple[int, Value], Spec] = {}
    makes: dict[Value, Spec] = {}
    enters = _entrances(layout)
    undivided: list[_Apart] = []
    for value, parts in found.items():
        (d,) = parts[0].ends[value]
        few = sum(part.rows * part.equation.trips for part in parts) < layout.program.shapes[value][d]
        if few and not all(part.somewhere and not part.lost for part in parts):
            continue  # a part of it is looked at, or cut off
        undivided += [part for part in parts if part.lost]
        for part in parts:
            for v, there in _while_apart(layout, part):
                if v in part.equation.outs:
                    makes[v] = there
                    continue
                reader = part.equation
                while v in enters:  # dealt out before a loop, not in each of its trips
                    lies[v] = there
                    reader, v = enters[v]
                reads[reader.index, v] = there
    before = layout.exchanges
    layout.exchanges = replace(
        before, lies={**before.lies, **lies}, reads={**before.reads, **reads}, makes={**before.makes, **makes}
    )
    if undivided:
        layout.findings.append(_computed_by_all(layout, undivided[0]))


def _apart(layout: Layout, e: Equation) -> _Apart | None:
    """What `e` takes apart, or puts together, along a divided dimension; None where it does neither."""
    v = e.ins[0] if e.primitive.cuts or e.primitive.factors else None
    if v is None or not all(map(layout.batchy, (v, *e.outs))):
        return None
    for d, axes in enumerate(layout.between(v)):
        over = tuple(a for a in axes if layout.dims.of(v)[d] not in layout.sequence)
        if over and (ends := _ends(layout, e, d)):
            kept = {a for out in e.outs for axes in layout.between(out) for a in axes}
            lost = not kept.issuperset(over)
            if lost and not (layout.dims.of(v)[d] in layout.batch.classes and _gives_parts(layout, e, v)):
                continue  # features that are cut off, and rows that are added, stay where they are
            rows = sum(layout.program.shapes[out][d] for out in e.outs) if e.primitive.cuts else math.inf
            return _Apart(e, over, ends, lost, rows)
    return None


def _ends(layout: Layout, e: Equation, d: int) -> dict[Value, frozenset[int]]:
    """The operands and results of `e` with the dimensions along which it changes dimension `d` of the first operand,
    divided otherwise before and after; empty where it does not."""
    shapes, v, out = layout.program.shapes, e.ins[0], e.outs[0]
    assert v is not None
    if e.primitive.factors:
        factors = e.factors
        leading = None if factors is None else factors.leading(d)
        if factors is None or factors.whole(d) is not None:
            return {}
        into = frozenset(next((new for old, new in factors.groups if d in old), ()))
        if leading is not None and layout.between(out)[leading] == layout.between(v)[d]:
            return {}
        return {v: frozenset({d}), out: into}
    if shapes[v][d] == shapes[out][d]:
        return {}
    same_rank = [w for w in (*e.ins, *e.outs) if w is not None and len(shapes[w]) == len(shapes[v])]
    usual = all(layout.batchy(w) and layout.at(e, w) == layout.between(w) for w in same_rank)
    return {w: frozenset({d}) for w in same_rank} if usual else {}


def _gives_parts(layout: Layout, e: Equation, v: Value) -> bool:
    """Whether `e` takes its operand `v` apart, and puts nothing together."""
    shapes = layout.program.shapes
    return bool(e.primitive.factors) or math.prod(shapes[e.outs[0]]) < math.prod(shapes[v])


def _while_apart(layout: Layout, part: _Apart) -> Iterator[tuple[Value, Spec]]:
    """How the operands and results lie meanwhile: whole along the dimension, another one divided in its place where one
    has room in all of them."""
    e, shapes = part.equation, layout.program.shapes
    v = next(iter(part.ends))
    beside: dict[int, dict[Value, int]] = {}
    for d in range(len(shapes[v])):
        in_all = {w: _faces(e, d, w, v) for w in part.ends}
        if d not in part.ends[v] and not part.lost and None not in in_all.values():
            beside[d] = {w: k for w, k in in_all.items() if k is not None}
    lying = {w: without(layout.between(w), part.over) for w in part.ends}

    def fits(places: Mapping[Value, int]) -> bool:
        return all(shapes[w][k] % layout.count((*lying[w][k], *part.over)) == 0 for w, k in places.items())

    room = [d for d, places in beside.items() if fits(places)]
    if room:
        best = beside[max(room, key=lambda d: shapes[v][d])]
        for w, k in best.items():
            lying[w][k] = (*lying[w][k], *part.over)
    yield from lying.items()


def _faces(e: Equation, d: int, end: Value, first: Value) -> int | None:
    """The dimension of an operand or a result that is dimension `d` of the first operand."""
    if end == first or e.primitive.cuts:
        return d
    return None if e.factors is None else e.factors.whole(d)


def _entrances(layout: Layout) -> dict[Value, tuple[Equation, Value]]:
    """Where values enter a body unchanged, by what they are inside: the body's equation, and what they are outside."""
    counts, found = layout.flow.orders.counts, {}
    for e in layout.program.equations:
        for door in e.doors:
            for _, inside, _ in door.into:
                if (outside := counts.entering(inside)) is not None:
                    found[inside] = e, outside
    return found


def _computed_by_all(layout: Layout, part: _Apart) -> Finding:
    """The warning of examples in pieces that are not divided."""
    shapes, over, n = layout.program.shapes, "+".join(part.over), layout.count(part.over)
    v, out = part.equation.ins[0], part.equation.outs[0]
    assert v is not None
    (d,) = part.ends[v]
    into = part.ends[out]
    size = next(shapes[out][k] for k in sorted(into) if layout.dims.of(out)[k] in layout.batch.classes)
    message = (
        f"{shapes[v][d]} examples are taken in pieces of {size} ({told(layout.program, part.equation.index)}), which "
        f"{over}={n} does not divide: every device computes all of each piece. Pieces of {-(-size // n) * n} would be "
        "divided."
    )
    return Finding("pieces-not-divided", "warning", message)
