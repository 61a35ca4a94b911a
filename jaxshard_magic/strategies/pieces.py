"""Exchanges around equations that take a value apart, or put it together, along a divided dimension.

A batch in pieces, to add up gradients; a fused weight's result, split into q, k and v; skip connections, concatenated.
The parts do not lie where the plan has them. Left alone, the compiler shifts what overlaps, by a permute for each part
and each distance, or gathers everything. Here the value is dealt out over another of its dimensions (one all-to-all),
taken apart on each device, and the parts are dealt out again.

Footgun: a small part (a roll by one row, a padded row) is cheaper as the compiler has it, which sends that part alone.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..plan import Finding
from ..program.batching.follow import told
from ..program.ir import Equation, Value
from .layout import Axes, Layout, Spec, without

UNEVEN = 16  # the largest part over the smallest: beyond that the compiler's shifts are cheaper


@dataclass(frozen=True)
class _Cut:
    """An equation that takes values apart, or puts them together, along dimensions that mesh axes divide.

    Args:
        equation: the equation.
        over: the mesh axes that divide what is taken apart, or put together, there.
        ends: its operands and results that have such a dimension, the first operand first, each with those dimensions.
        sizes: how long the parts are; empty where a reshape makes them.
        undivided: whether the axes divide none of the parts.
        examples: whether what is taken apart are examples, not features.
    """

    equation: Equation
    over: Axes
    ends: Mapping[Value, frozenset[int]]
    sizes: Sequence[int]
    undivided: bool
    examples: bool

    @property
    def at_run_time(self) -> bool:
        """Return whether the place of the part is known only while the step runs: compilers gather all for it."""
        return self.equation.primitive.part and len(self.equation.ins) > 1


def take_apart(layout: Layout) -> None:
    """Have values whole along the dimensions that they are taken apart along, or put together, where that is done.

    Where the axes divide no part, every device makes all of each part, and that is told. Adds to `layout.exchanges` and
    `layout.findings`; all strategies have filled in the layout before.
    """
    cuts: dict[Value, list[_Cut]] = defaultdict(list)
    for e in layout.program.equations:
        if (cut := _cut(layout, e)) is not None:
            cuts[next(iter(cut.ends))].append(cut)
    for value, of_one in cuts.items():
        if not all(cut.undivided for cut in of_one):
            # Dealt out for some parts, features that no axis divides are gathered out of that, too.
            cuts[value] = [replace(cut, undivided=cut.undivided and cut.examples) for cut in of_one]
    exchanged = [cut for value, of_one in cuts.items() if _worth_it(layout, value, of_one) for cut in of_one]
    if not exchanged:
        return
    lies: dict[Value, Spec] = {}
    reads: dict[tuple[int, Value], Spec] = {}
    makes: dict[Value, Spec] = {}
    program = layout.program
    for cut in exchanged:
        for value, spec in _meanwhile(layout, cut):
            reader = cut.equation
            if value in reader.outs:
                makes[value] = spec
                continue
            while (outside := program.outside(value)) is not None:  # before a loop, not in each of its trips
                lies[value] = spec
                reader, value = program.entrances[value].equation, outside
            reads[reader.index, value] = spec
    before = layout.exchanges
    layout.exchanges = replace(
        before, lies={**before.lies, **lies}, reads={**before.reads, **reads}, makes={**before.makes, **makes}
    )
    if undivided := [cut for cut in exchanged if cut.undivided and cut.examples]:
        layout.findings.append(_computed_by_all(layout, undivided[0]))


def _cut(layout: Layout, e: Equation) -> _Cut | None:
    """Return what `e` takes apart, or puts together, along a divided dimension, or None."""
    v = e.ins[0] if e.primitive.cuts or e.primitive.factors else None
    if v is None or not all(map(layout.batchy, (v, *e.outs))):
        return None
    classes = layout.dims.of(v)
    for d, axes in enumerate(layout.between(v)):
        over = axes or _divided_together(layout, e, d)
        if not over or classes[d] in layout.sequence or not (ends := _ends(layout, e, d)):
            continue
        sizes, together = _parts(layout, e, d)
        made = {a for out in e.outs for spec in layout.between(out) for a in spec}
        undivided = not axes or not made.issuperset(axes)
        if axes and undivided and together:
            continue  # rows and features that are added stay where they are
        return _Cut(e, over, ends, sizes, undivided, classes[d] in layout.batch.classes)
    return None


def _divided_together(layout: Layout, e: Equation, d: int) -> Axes:
    """Return the mesh axes that divide features which `e` puts together along dimension `d`, of parts none of which is
    divided there; empty where it does not."""
    shapes, v, out = layout.program.shapes, e.ins[0], e.outs[0]
    assert v is not None
    if (
        e.factors is not None
        or shapes[out][d] <= shapes[v][d]
        or layout.dims.of(v)[d] in layout.batch.classes
    ):
        return ()
    parts = (w for w in e.ins if w is not None and len(shapes[w]) == len(shapes[v]))
    return () if any(layout.between(w)[d] for w in parts) else layout.between(out)[d]


def _ends(layout: Layout, e: Equation, d: int) -> dict[Value, frozenset[int]]:
    """Return the operands and results of which `e` changes dimension `d` of its first operand, with their dimensions.

    Empty where it changes another one, or where each device has what it makes.
    """
    shapes, v, out = layout.program.shapes, e.ins[0], e.outs[0]
    assert v is not None
    if (factors := e.factors) is not None:
        leading = factors.leading(d)
        stays = leading is not None and layout.between(out)[leading] == layout.between(v)[d]
        if stays or factors.whole(d) is not None:
            return {}
        return {v: frozenset({d}), out: frozenset(next((new for old, new in factors.groups if d in old), ()))}
    if shapes[v][d] == shapes[out][d]:
        return {}
    arrays = [w for w in (*e.ins, *e.outs) if w is not None and len(shapes[w]) == len(shapes[v])]
    usual = all(layout.batchy(w) and layout.at(e, w) == layout.between(w) for w in arrays)
    return {w: frozenset({d}) for w in arrays} if usual else {}


def _parts(layout: Layout, e: Equation, d: int) -> tuple[list[int], bool]:
    """Return the sizes of the parts along dimension `d`, and whether `e` puts them together."""
    shapes, v = layout.program.shapes, e.ins[0]
    assert v is not None
    if e.factors is not None:
        return [], False
    if math.prod(shapes[e.outs[0]]) < math.prod(shapes[v]):
        return [shapes[out][d] for out in e.outs], False
    parts = [shapes[w][d] for w in e.ins if w is not None and len(shapes[w]) == len(shapes[v])]
    return [*parts, shapes[e.outs[0]][d] - sum(parts)] if len(parts) == 1 else parts, True


def _worth_it(layout: Layout, value: Value, cuts: Sequence[_Cut]) -> bool:
    """Return whether all of a value is taken apart, in parts that are not too uneven, or where the step says."""
    if all(cut.at_run_time and not cut.undivided for cut in cuts) or not all(cut.sizes for cut in cuts):
        return True
    (d,) = cuts[0].ends[value]
    sizes = [size for cut in cuts for size in cut.sizes]
    covered = sum(size * cut.equation.trips for cut in cuts for size in cut.sizes)
    even = (
        len({*sizes}) == 1
        if any(cut.undivided and cut.examples for cut in cuts)
        else max(sizes) <= UNEVEN * min(sizes)
    )
    return even and covered >= layout.program.shapes[value][d]


def _meanwhile(layout: Layout, cut: _Cut) -> Iterator[tuple[Value, Spec]]:
    """Yield how operands and results lie meanwhile: whole along the dimension.

    Another dimension is divided in its place, where one has room in all of them: the largest.
    """
    e, shapes, first = cut.equation, layout.program.shapes, next(iter(cut.ends))
    whole = {v: without(layout.between(v), cut.over) for v in cut.ends}

    def places(d: int) -> dict[Value, int] | None:
        """The dimensions that face dimension `d` of the first operand, where the axes divide each of them, too."""
        found = {v: _facing(e, d, v, first) for v in cut.ends}
        if d in cut.ends[first] or cut.undivided:
            return None
        if any(k is None or shapes[v][k] % layout.count((*whole[v][k], *cut.over)) for v, k in found.items()):
            return None
        return {v: k for v, k in found.items() if k is not None}

    room = [(shapes[first][d], found) for d in range(len(shapes[first])) if (found := places(d)) is not None]
    instead = max(room, key=lambda each: each[0])[1] if room else {}
    for v, spec in whole.items():
        yield v, [(*axes, *cut.over) if instead.get(v) == k else axes for k, axes in enumerate(spec)]


def _facing(e: Equation, d: int, value: Value, first: Value) -> int | None:
    """Return the dimension of an operand or a result that is dimension `d` of the first operand."""
    if value == first or e.factors is None:
        return d
    return e.factors.whole(d)


def _computed_by_all(layout: Layout, cut: _Cut) -> Finding:
    """Return the warning of examples in pieces that are not divided."""
    shapes, over, n = layout.program.shapes, "+".join(cut.over), layout.count(cut.over)
    (value, dims), out = next(iter(cut.ends.items())), cut.equation.outs[0]
    (d,) = dims
    size = next(
        shapes[out][k] for k in sorted(cut.ends[out]) if layout.dims.of(out)[k] in layout.batch.classes
    )
    where = told(layout.program, cut.equation.index)
    message = (
        f"{shapes[value][d]} examples are taken in pieces of {size} ({where}), which {over}={n} does not divide: every "
        f"device computes all of each piece. Pieces of {-(-size // n) * n} would be divided."
    )
    return Finding("pieces-not-divided", "warning", message)
