"""A device's memory that a step takes under a layout, estimated from the traced step before anything is compiled.

Arrays at rest are exact. Of what lies in between, the compiler fuses what it computes element by element into what
reads it, and keeps what products, lookups, sums and loops make until their last reader. It may do better by computing
again, and worse by another order.
"""

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, replace

from ..program.ir import Equation, Scope, Value
from ..program.primitives import scan_counts
from .hold import Hold
from .regions import Region


@dataclass(frozen=True)
class Footprint:
    """Bytes on one device: `arrays`, all that go in, and come out without taking the place of one that went in;
    `between`, the most that lies there meanwhile."""

    arrays: int
    between: int

    @property
    def peak(self) -> int:
        return self.arrays + self.between


def footprint(hold: Hold, donated: Collection[int] = ()) -> Footprint:
    """The bytes of a step as `hold` emits it. `donated`: inputs, by number, whose memory an output takes over."""
    return _Estimate(hold).whole(donated)


def footprint_of_part(
    hold: Hold, equations: Container[int], known: Collection[Value], results: Collection[Value]
) -> int:
    """The bytes on one device that a part of a step takes beside its arguments, as a program of its own.

    Args:
        hold: the whole step.
        equations: those of the top level that the part runs, by index.
        known: values that are given to it, beside inputs of the step.
        results: values that it hands on.
    """
    return _Estimate(hold).part(equations, known, results)


class _Estimate:
    def __init__(self, hold: Hold):
        self._hold, self._layout, self._program = hold, hold.layout, hold.program
        self._used = self._layout.flow.used
        self._kept: dict[int, bool] = {}

    def whole(self, donated: Collection[int]) -> Footprint:
        """What comes out takes the place of what it was made from: gradients wait for all of it, or it for them."""
        program = self._program
        outs = {v for v in program.outputs if v is not None} - {*program.inputs}
        given = sum(self._bytes(program.inputs[i]) for i in donated)
        added = max(0, sum(map(self._bytes, outs)) - given)
        gathered = 2 * self._largest_gathered(program.equations)  # one in use, the next on its way
        between = self._peak(program.top, outs) + gathered
        return Footprint(sum(map(self._bytes, program.inputs)) + added, max(0, between - added))

    def part(self, equations: Container[int], known: Collection[Value], results: Collection[Value]) -> int:
        top = self._program.top
        chosen = replace(top, equations=[e for e in top.equations if e.index in equations])
        outs = {*results} - {*known, *self._program.inputs}
        between = self._peak(chosen, outs) + 2 * self._largest_gathered(chosen.walk())
        return sum(map(self._bytes, outs)) + between

    def _largest_gathered(self, equations: Iterable[Equation]) -> int:
        """Bytes of the largest weight as it lies where it is used, of those that are gathered for that."""
        layout, most = self._layout, 0
        for e in equations:
            if not e.doors and layout.storage.batchy_equation(e):
                for v in e.ins:
                    if v is not None and not layout.batchy(v) and self._hold.gathers(v):
                        most = max(most, layout.bytes_of(v, layout.in_use(v)))
        return most

    def _peak(self, scope: Scope, outs: Collection[Value]) -> int:
        """The most bytes that values of a scope take together, beside what goes in and comes out of it."""
        roots: dict[Value, frozenset[Value]] = {}
        last: dict[Value, int] = {}
        kept = []
        for e in scope.equations:
            read = frozenset[Value]().union(*(roots.get(v, ()) for v in e.ins if v is not None))
            if self._used.isdisjoint(e.outs) and not e.doors:
                continue
            if self._is_kept(e):
                roots |= {v: frozenset([v]) for v in e.outs}
                last |= dict.fromkeys(read, len(kept))
                kept.append(e)
            else:
                roots |= dict.fromkeys(e.outs, read)
        for v in outs:
            last |= dict.fromkeys(roots.get(v, ()), len(kept))
        ends: dict[int, list[Value]] = {}
        now = most = 0
        for at, e in enumerate(kept):
            born = [v for v in e.outs if v in last and v not in outs]
            now += sum(map(self._bytes, born))
            most = max(most, now + self._held(e, self._hold.regions_of(e)))
            for v in born:
                ends.setdefault(last[v], []).append(v)
            now -= sum(map(self._bytes, ends.pop(at, ())))
        return most

    def _held(self, e: Equation, regions: tuple[Region, ...]) -> int:
        """What an equation takes while it runs, beside what goes in and comes out of it."""
        if regions:
            return regions[0].held(e, lambda: self._held(e, regions[1:]))
        return max((self._trip(e, door.scope) for door in e.doors), default=0)

    def _trip(self, e: Equation, scope: Scope) -> int:
        """What one run of a body takes: its own values and, in a loop, its slices of what is stacked."""
        outs = {v for v in scope.outs if v is not None}
        inside = self._peak(scope, outs)
        if not e.is_scan:
            return inside
        n, k = scan_counts(e.params)
        slices = (*scope.ins[n + k :], *(v for v in scope.outs[k:] if v is not None))
        return inside + sum(map(self._bytes, slices))

    def _is_kept(self, e: Equation) -> bool:
        if e.index not in self._kept:
            inner = (i for door in e.doors for i in door.scope.equations)
            self._kept[e.index] = e.primitive.kept or any(map(self._is_kept, inner))
        return self._kept[e.index]

    def _bytes(self, v: Value) -> int:
        layout = self._layout
        return layout.bytes_of(v, layout.active(v) if layout.batchy(v) else layout.at_rest(v))
