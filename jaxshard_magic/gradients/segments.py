"""Where to cut a loss that is rematerialised: what is kept between which equations, and the cuts that keep least."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..program.flops import counted
from ..program.flow import Flow
from ..program.ir import Program, Scope, Value
from ..program.sizes import nbytes
from .kept import keeps

MOST_PLACES = 96  # to cut at, weighed against each other


@dataclass(frozen=True)
class Costs:
    """The equations of a scope as the cutting sees them, by their position.

    `made`: values that each makes for later ones, `read`: those that it is the last to read, `kept`: those that it is
    the first to keep for its backward pass. `own`: bytes that it keeps besides, `flops`: of its products, all trips of
    loops together. `size`: bytes of every value, 0 of the inputs and their casts, which are there all the time;
    `born`: the position of the equation that makes it.
    """

    made: tuple[tuple[Value, ...], ...]
    read: tuple[tuple[Value, ...], ...]
    kept: tuple[tuple[Value, ...], ...]
    own: tuple[int, ...]
    flops: tuple[int, ...]
    size: dict[Value, int]
    born: dict[Value, int]

    def inside(self, start: int, stop: int) -> int:
        """Bytes that the backward pass of these equations needs, what other equations made left out."""
        values = {v for found in self.kept[start:stop] for v in found if self.born.get(v, -1) >= start}
        return sum(self.own[start:stop]) + sum(self.size[v] for v in values)


@dataclass(frozen=True)
class Cut:
    """Segments (first equation, the one after the last), and the most bytes that their backward passes hold at once."""

    segments: tuple[tuple[int, int], ...]
    peak: int


def costs(program: Program, scope: Scope) -> Costs:
    """What the equations of a scope keep and what crosses between them."""
    born = {v: k for k, e in enumerate(scope.equations) for v in e.outs}
    last = {v: k for k, e in enumerate(scope.equations) for v in e.ins if v in born}
    kept = keeps(scope)
    first: dict[Value, int] = {}
    for k, found in enumerate(kept):
        for v in found.values:
            first.setdefault(v, k)

    def at(where: dict[Value, int]) -> tuple[tuple[Value, ...], ...]:
        lists: list[list[Value]] = [[] for _ in scope.equations]
        for v, k in where.items():
            lists[k].append(v)
        return tuple(map(tuple, lists))

    return Costs(
        made=at({v: born[v] for v in last}),
        read=at(last),
        kept=at(first),
        own=tuple(found.own for found in kept),
        flops=_flops(program, scope),
        size=_sizes(program, scope),
        born=born,
    )


def best_cuts(costs: Costs, start: int, stop: int, most: int) -> list[Cut]:
    """For 1, 2, ... `most` segments of the equations from `start` to `stop` the cut whose peak is lowest, as far as
    there are places to cut; of equal ones that which does least again.

    A segment holds its outputs until all later ones have had their backward pass, and what is inside of it while its
    own runs: from segment i on that takes `max(inside_i, outputs_i + what it takes from segment i + 1 on)`. The last
    segment's backward pass begins where its forward pass ends: what is inside of it is kept in any case.
    """
    places = [start, *_places(costs, start, stop, most), stop]
    inside, out = zip(*(_ranges(costs, k, places) for k in range(len(places) - 1)), strict=True)
    flops = [0, *accumulate(costs.flops)]
    end = len(places) - 1
    table = [
        [(inside[a][-1], 0, end) for a in range(end)]
    ]  # peak, FLOPs done again, end of the first segment
    for count in range(2, min(most, end) + 1):
        rest = table[-1]
        row = []
        for a in range(end - count + 1):
            ways = (
                (
                    max(inside[a][b - a - 1], out[a][b - a - 1] + rest[b][0]),
                    flops[places[b]] - flops[places[a]] + rest[b][1],
                    b,
                )
                for b in range(a + 1, end - count + 2)
            )
            row.append(min(ways))
        table.append(row)
    return [Cut(_segments(table[: k + 1], places), row[0][0]) for k, row in enumerate(table)]


def fewest(cuts: Sequence[Cut], at_least: int = 1) -> Cut:
    """Of the cuts into 1, 2, ... segments the first that comes within 10 % of the lowest peak."""
    allowed = cuts[min(at_least, len(cuts)) - 1 :]
    low = min(cut.peak for cut in allowed)
    return next(cut for cut in allowed if cut.peak <= 1.1 * low)


def _segments(table: Sequence[Sequence[tuple[int, int, int]]], places: Sequence[int]) -> tuple:
    at, found = 0, []
    for row in reversed(table):
        after = row[at][2]
        found.append((places[at], places[after]))
        at = after
    return tuple(found)


def _places(costs: Costs, start: int, stop: int, most: int) -> list[int]:
    """Where to cut: where no more bytes cross than on either side; everywhere if that is too few places."""
    crossing = dict(zip(range(start + 1, stop), _ranges(costs, 0, range(start, stop))[1], strict=True))
    low = [p for p in crossing if _is_low(crossing, p)]
    chosen, room = low if len(low) >= most - 1 else list(crossing), max(MOST_PLACES, most - 1)
    if len(chosen) <= room:
        return chosen
    edges = [k * len(chosen) // room for k in range(room + 1)]
    return [min(chosen[a:b], key=crossing.__getitem__) for a, b in pairwise(edges)]


def _is_low(crossing: dict[int, int], place: int) -> bool:
    here = crossing[place]
    return all(here <= crossing.get(beside, here) for beside in (place - 1, place + 1))


def _ranges(costs: Costs, first: int, places: Sequence[int]) -> tuple[list[int], list[int]]:
    """For the equations from the `first` of the places up to each later one: bytes inside, and bytes that leave."""
    start = places[first]
    inside, out = [], []
    held = live = 0
    for a, b in pairwise(places[first:]):
        for k in range(a, b):
            held += costs.own[k] + _bytes(costs, costs.kept[k], start)
            live += _bytes(costs, costs.made[k], start) - _bytes(costs, costs.read[k], start)
        inside.append(held)
        out.append(live)
    return inside, out


def _bytes(costs: Costs, values: Sequence[Value], start: int) -> int:
    return sum(costs.size[v] for v in values if costs.born.get(v, -1) >= start)


def _sizes(program: Program, scope: Scope) -> dict[Value, int]:
    """Bytes of every value of a scope; what is an input in another form, and no larger, costs nothing to keep."""
    size = {v: nbytes(program.avals[v]) for e in scope.equations for v in e.outs}
    free = {*scope.ins, *scope.const_values}
    largest = {v: nbytes(program.avals[v]) for v in free}
    for e in scope.equations:
        if e.primitive.alias and e.ins[0] in free:
            forms = [v for v in e.outs if size[v] <= largest[e.ins[0]]]
            free.update(forms)
            largest.update((v, size[v]) for v in forms)
    return size | dict.fromkeys(free, 0)


def _flops(program: Program, scope: Scope) -> tuple[int, ...]:
    """FLOPs of the products of each equation, those in its bodies with it."""
    indices = [e.index for e in scope.equations]
    found = [0] * len(indices)
    for work in counted(program, Flow(program)):
        found[bisect_right(indices, work.equation) - 1] += work.flops
    return tuple(found)
