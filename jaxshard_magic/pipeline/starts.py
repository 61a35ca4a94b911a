"""Where a stage may begin: at names that are asked for, or at the markers in the model."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ..errors import ShardError, one_of
from ..gradients.named import Names
from ..program.flow import made_of
from ..program.ir import Door, Equation, Value
from .marker import NAME
from .units import Units


@dataclass(frozen=True)
class Marked:
    """`starts`: the units that begin at a marker, with others before and after them. `inside`: how many markers stand
    between two operations of what is never cut."""

    starts: list[int]
    inside: int


def allowed_starts(
    units: Units, stages: int, chunks: int = 1, pattern: str | None = None
) -> list[int] | None:
    """The units that one of `stages` stages may begin at, of which a rank runs `chunks`: where `pattern` finds a name,
    without one where the loss has markers (`jaxshard_magic.cut`). None where it has neither: at any.

    Raises ShardError where these are too few, with how many there are.
    """
    if pattern is not None:
        starts = named_starts(units, pattern)
        n = len({*starts} - {0}) + 1
        if n < stages:
            raise ShardError(
                f"--cut: there are {n} places for a stage to begin, {stages} stages are asked for; use --stages "
                f"{max(n // chunks, 1)} or fewer, or an expression that finds more"
            )
        return starts
    marked = marked_starts(units)
    if marked is None:
        return None
    if len(marked.starts) + 1 < stages:
        raise _too_few(marked, stages, chunks)
    return marked.starts


def named_starts(units: Units, pattern: str) -> list[int]:
    """The units at which a module, a function or a scope begins whose name the regular expression `pattern` finds.

    Raises ShardError, with the names that there are, where it finds none.
    """
    names = Names(units.loss)
    spans = names.spans(units.loss.top, re.compile(pattern))
    starts = set()
    for first, stop in spans:
        inside = {e.index for e in units.loss.top.equations[first:stop]}
        mine = [units.span[e.index][0] for e in units.main if e.index in inside]
        starts.update(mine[:1])
    if not starts:
        there = one_of(names.nearest(pattern))
        raise ShardError(
            f"--cut {pattern!r} finds no module, function or scope that the loss calls"
            + (f"; there are {there}" if there else "; it names none: leave --cut out")
        )
    return sorted(starts)


def marked_starts(units: Units) -> Marked | None:
    """Where the markers of a loss let a stage begin; None where it has none.

    One at the start of an equation with a body counts as before it, one at its end as behind it; of a scan that is
    each layer.
    """
    starts: set[int] = set()
    markers: set[int] = set()  # units that are nothing else
    after, inside, seen = 0, 0, False
    for e in units.loss.top.equations:
        first, last = units.span.get(e.index, (after, after - 1))
        after = last + 1
        runs = [is_marker for is_marker, _ in groupby(_marks([e], units.trained, units.varying))]
        if True not in runs:
            continue
        seen = True
        inside += sum(runs[1:-1])
        if e.index in units.span and not e.doors:
            markers.add(first)
        if runs[0]:
            starts.update(range(first, max(after, first + 1)))
        if len(runs) > 1 and runs[-1]:
            starts.update(range(first + 1, after + 1))
    if not seen:
        return None
    work = [u for u in range(len(units.units)) if u not in markers]
    ends = {bisect_left(work, u) for u in starts}  # markers that follow one another are one place
    return Marked(sorted({work[k - 1] + 1 for k in ends if 0 < k < len(work)}), inside)


def _marks(
    equations: Iterable[Equation], trained: Collection[Value], varying: Collection[Value]
) -> Iterator[bool]:
    """True for each marker among `equations` and in their bodies, in order; False for each that works on parameters
    and examples."""
    for e in equations:
        if e.primitive.names_value and e.params["name"] == NAME:
            yield True
        elif e.doors:
            for door in e.doors:
                inner = _inside(door, trained), _inside(door, varying)
                yield from _marks(door.scope.equations, *inner)
        elif not e.primitive.alias and any(v in trained and v in varying for v in e.outs):
            yield False


def _inside(door: Door, outside: Collection[Value]) -> set[Value]:
    """The values of a body that are made of values outside of it."""
    start = {b for a, b, _ in door.into if a in outside}
    while True:
        made = made_of(door.scope, start)
        again = {b for a, b in door.loop if a in made} - start
        if not again:
            return made
        start |= again


def _too_few(marked: Marked, stages: int, chunks: int) -> ShardError:
    n, k = len(marked.starts), marked.inside
    asked = f"--stages {stages // chunks}" + (f" of {chunks} chunks each" if chunks > 1 else "")
    lost = f" ({k} more in the middle of a loop's body, a branch or remat, which stay whole)" if k else ""
    most = (n + 1) // chunks
    fix = f"--stages {most}" if most > 1 else None
    more = "move those to its start or end, or mark more" if k else "mark more"
    fewer = f"use {fix} or fewer, or {more}" if fix else more
    if chunks > 1 and not fix:
        fewer += ", or use a schedule with one chunk a rank"
    return ShardError(
        f"{asked}: jaxshard_magic.cut marks {n} place{'s' * (n != 1)} for a stage to begin{lost}, {stages - 1} "
        f"{'are' if stages > 2 else 'is'} needed; {fewer}",
        fix=fix,
    )
