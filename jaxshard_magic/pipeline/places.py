"""Where each part of the step around its gradient calls runs, and when: where most of what it reads lives."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..program.flow import made_of, needed
from ..program.ir import Equation, Program, Value
from ..program.sizes import nbytes
from .kinds import Kinds


@dataclass(frozen=True)
class Group:
    """Equations that run together at one place: `wanted` are read elsewhere or given, `reads` come from elsewhere.

    `phase`: how many of the step's gradient calls are over when they run.
    """

    phase: int
    level: int
    place: int
    wanted: tuple[Value, ...]
    reads: tuple[Value, ...]


@dataclass(frozen=True)
class Placed:
    """`at[v]`: where a value lives that is an input, a result, or made by a group; `groups` in an order to run them."""

    at: Mapping[Value, int]
    groups: tuple[Group, ...]


def placed(
    program: Program,
    results: Sequence[Mapping[Value, int]],
    wanted_at: Mapping[Value, int],
    same: Iterable[tuple[Value, Value]],
    last: int,
    operands: Sequence[Collection[Value]],
    everywhere: Iterable[Value] = (),
) -> Placed:
    """Places for all of `program`.

    Args:
        results: the places of the results of each gradient call.
        wanted_at: the places that the losses read a value at, for inputs that no gradient places.
        same: pairs of an input and an output that the next step takes in its place.
        last: where numbers go that belong nowhere.
        operands: what each gradient call reads.
        everywhere: inputs that are at every place, such as the batch.
    """
    kinds, pairs = Kinds(program), list(same)
    given = {v: place for each in results for v, place in each.items()}
    for i, o in pairs:
        kinds.join(i, o)
    filled = {v: place for v, place in wanted_at.items() if program.shapes[v]}
    of_kind = _agreed(kinds, filled) | _agreed(kinds, {v: p for v, p in given.items() if program.shapes[v]})
    at, free = dict(given), set(everywhere)
    inputs = [v for v in program.inputs if v not in at and v not in free]
    for v in inputs:
        place = of_kind.get(kinds.of(v), wanted_at.get(v))
        if place is not None:
            at[v] = place
    _follow(program, at, pairs, last)
    at |= {v: last for v in inputs if v not in at}
    groups = _Groups(program, at, results, last, operands)
    state = {o: at[i] for i, o in pairs if i in at}
    read = {v: wanted_at.get(v, last) for v in sorted(set().union(*operands))}
    ends = {v: state.get(v, last) for v in program.outputs if v is not None}
    return Placed(groups.at, groups.all(ends | read))


def _agreed(kinds: Kinds, places: Mapping[Value, int]) -> dict[Value, int]:
    """The place of each kind whose values are all at one."""
    at_of: dict[Value, set[int]] = defaultdict(set)
    for v, place in places.items():
        at_of[kinds.of(v)].add(place)
    return {kind: min(at) for kind, at in at_of.items() if len(at) == 1}


def _follow(program: Program, at: dict[Value, int], pairs: Sequence[tuple[Value, Value]], last: int) -> None:
    """Put state that has no place yet where its next value is made."""
    while True:
        made = dict(at)
        for e in program.top.equations:
            read = {v for v in e.ins if v in made}
            if read and not made.keys() & set(e.outs):
                made.update(dict.fromkeys(e.outs, _place(program, read, made, last)))
        more = {i: made[o] for i, o in pairs if i not in at and o in made}
        if not more:
            return
        at |= more


_Key = tuple[int, int, int]  # of a group: its phase, its level, its place


class _Groups:
    """The equations of `program` in groups; `at` is completed.

    What a gradient call reads runs right before it, and what is made of its results right after it, so that gradients
    are not held through the next call. Else numbers run before all calls, and arrays after them: made earlier, they
    would be held all through them beside those that they are made of.

    What is made of nothing that has a place, and arrays made of numbers alone, live nowhere: each group that reads them
    makes them.
    """

    def __init__(
        self,
        program: Program,
        at: dict[Value, int],
        results: Sequence[Collection[Value]],
        last: int,
        operands: Sequence[Collection[Value]],
    ):
        self.program, self.at, self._operands = program, at, operands
        self._ready = {v: call for call, given in enumerate(results, 1) for v in given}
        self._after: dict[Value | None, int] = {}
        for call, given in enumerate(results, 1):
            self._after.update(dict.fromkeys(made_of(program.top, given), call))
        self._for: dict[int, int] = {}  # the first call that needs an equation
        for call, read in reversed(list(enumerate(operands))):
            self._for.update(dict.fromkeys(needed(program.top, read, program.inputs), call))
        self._behind: dict[
            Value, frozenset[Value]
        ] = {}  # of what lives nowhere: the values with a place that it reads
        self._level: dict[Value, int] = defaultdict(int)
        self._readers: dict[Value, set[_Key]] = defaultdict(set)
        self._home: dict[Value, _Key] = {}
        self._made: dict[_Key, list[Value]] = defaultdict(list)
        for e in program.top.equations:
            self._take(e, last)

    def _sources(self, values: Iterable[Value | None]) -> frozenset[Value]:
        read = {v for v in values if v is not None}
        return frozenset(read & self.at.keys()).union(*(self._behind.get(v, ()) for v in read))

    def _take(self, e: Equation, last: int) -> None:
        sources, shapes = self._sources(e.ins), self.program.shapes
        if not any(shapes[v] for v in sources) and (not sources or any(shapes[v] for v in e.outs)):
            self._behind.update(dict.fromkeys(e.outs, sources))
            return
        place = _place(self.program, sources, self.at, last)
        phase = self._phase(e, sources)
        levels = (self._level[v] + (self.at[v] != place) for v in sources if self._ready.get(v, 0) == phase)
        key = (phase, max(levels, default=0), place)
        for v in e.outs:
            self.at[v], self._level[v], self._home[v], self._ready[v] = place, key[1], key, phase
        self._made[key] += e.outs
        for v in sources:
            self._readers[v].add(key)

    def _phase(self, e: Equation, sources: Iterable[Value]) -> int:
        """When an equation runs that reads `sources`."""
        if e.index in self._for:
            return self._for[e.index]
        arrays = any(self.program.shapes[v] for v in e.outs)
        first = self._after.get(next(iter(e.outs), None), len(self._operands) if arrays else 0)
        return max([first, *(self._ready.get(v, 0) for v in sources)])

    def all(self, places: Mapping[Value, int]) -> tuple[Group, ...]:
        """The groups in an order to run them; the values of `places` are wanted, those that live nowhere there."""
        known, inputs = set(self._home), set(self.program.inputs)
        for v in places:
            if v in self.at or v in inputs:
                continue
            calls = (call for call, read in enumerate(self._operands) if v in read)
            phase = next(calls, len(self._operands))
            level = 1 + max((n for other, n, _ in self._made if other == phase), default=-1)
            key = self._home[v] = (phase, level, places[v])
            self._made[key].append(v)
            for source in self._behind.get(v, ()):
                self._readers[source].add(key)
        self.at.update((v, self._home[v][2]) for v in places if v in self._home)
        groups = []
        for key in sorted(self._made):
            mine = self._made[key]
            wanted = [v for v in mine if v in places or self._readers[v] - {key}]
            if wanted:
                reads = _reads(self.program, wanted, (known | inputs) - set(mine))
                groups.append(Group(*key, tuple(wanted), reads))
        return tuple(groups)


def _place(program: Program, read: Iterable[Value], at: Mapping[Value, int], last: int) -> int:
    """Where most bytes of what is read live; of numbers alone, where all of them do, else `last`."""
    size: Counter[int] = Counter()
    for v in sorted(read):
        if program.shapes[v]:
            size[at[v]] += nbytes(program.avals[v])
    if size:
        return max(size, key=lambda place: (size[place], -place))
    places = {at[v] for v in read}
    return places.pop() if len(places) == 1 else last


def _reads(program: Program, wanted: Iterable[Value], known: Collection[Value]) -> tuple[Value, ...]:
    """What a group that makes `wanted` reads of what is known."""
    indices = needed(program.top, set(wanted), known)
    read = dict.fromkeys(v for e in program.top.equations if e.index in indices for v in e.ins if v in known)
    return tuple(v for v in read if v is not None)
