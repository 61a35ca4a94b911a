"""Where each part of the step around the gradient call runs: where most of what it reads lives."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..gradients.part import needed
from ..program.ir import Equation, Program, Value
from ..program.sizes import nbytes
from .around import Kinds
from .units import reached


@dataclass(frozen=True)
class Group:
    """Equations that run together at one place: `wanted` of them are read elsewhere or given, `reads` come from elsewhere.

    `before`: they run before the gradient call, for what it reads.
    """

    place: int
    level: int
    before: bool
    wanted: tuple[Value, ...]
    reads: tuple[Value, ...]


@dataclass(frozen=True)
class Placed:
    """`at[v]`: where a value lives that is an input, a result, or made by a group; `groups` in an order to run them."""

    at: Mapping[Value, int]
    groups: tuple[Group, ...]


def placed(
    program: Program,
    given: Mapping[Value, int],
    wanted_at: Mapping[Value, int],
    same: Iterable[tuple[Value, Value]],
    last: int,
    operands: Iterable[Value],
    everywhere: Iterable[Value] = (),
) -> Placed:
    """Places for all of `program`.

    Args:
        given: the places of the gradient call's results.
        wanted_at: the places that the loss reads a value at, for inputs that nothing else places.
        same: pairs of an input and an output that the next step takes in its place.
        last: where numbers go that belong nowhere.
        operands: what the gradient call reads.
        everywhere: inputs that are at every place, such as the batch.
    """
    kinds = Kinds(program)
    for i, o in same:
        kinds.join(i, o)
    at: dict[Value, int] = {}
    of_kind: dict[Value, int] = {}
    for v, place in (*wanted_at.items(), *given.items()):  # a gradient says more than a use
        if program.shapes[v]:
            of_kind[kinds.of(v)] = place
    at.update(given)
    free = set(everywhere)
    for v in program.inputs:
        if v not in at and v not in free:
            at[v] = of_kind.get(kinds.of(v), wanted_at.get(v, last))
    return _grouped(program, at, given, last, {v: wanted_at.get(v, last) for v in operands})


def _grouped(
    program: Program,
    at: dict[Value, int],
    given: Mapping[Value, int],
    last: int,
    operands: Mapping[Value, int],
) -> Placed:
    """`at` completed, and the equations in groups: as early as what they read lets them."""
    late = reached(program, given)
    behind: dict[
        Value, frozenset[Value]
    ] = {}  # of a value that lives nowhere: the values with a place that it reads
    level: dict[Value, int] = defaultdict(int)
    groups: dict[tuple[bool, int, int], list[Value]] = defaultdict(list)
    home: dict[Value, tuple[bool, int, int]] = {}

    def sources(e: Equation) -> frozenset[Value]:
        read = [v for v in e.ins if v is not None]
        return frozenset(v for v in read if v in at).union(*(behind.get(v, frozenset()) for v in read))

    readers: dict[Value, list[Equation]] = defaultdict(list)
    for e in program.top.equations:
        found = sources(e)
        if not found:
            behind.update(dict.fromkeys(e.outs, found))
            continue
        place = _place(program, found, at, last)
        before = not late.intersection(e.outs)
        levels = [level[v] + (at[v] != place) for v in found if before or v in late]
        key = (before, max(levels, default=0), place)
        for v in e.outs:
            at[v], level[v], home[v] = place, key[1], key
        groups[key] += e.outs
        for v in found:
            readers[v].append(e)
    ends = [v for v in program.outputs if v is not None]
    for v in (*operands, *ends):
        if v not in at and v not in program.inputs:
            key = (v in operands, max((k[1] for k in groups), default=0), operands.get(v, last))
            at[v], home[v] = key[2], key
            groups[key].append(v)
    final = {*operands, *ends}
    made = []
    for key in sorted(groups, key=lambda k: (not k[0], k[1], k[2])):
        mine = set(groups[key])
        wanted = [v for v in groups[key] if v in final or any(home[e.outs[0]] != key for e in readers[v])]
        if wanted:
            made.append(Group(key[2], key[1], key[0], tuple(wanted), _reads(program, wanted, mine, home)))
    return Placed(at, tuple(made))


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


def _reads(
    program: Program, wanted: Iterable[Value], mine: set[Value], home: Mapping[Value, object]
) -> tuple[Value, ...]:
    """What a group reads that it does not make."""
    known = {v for v in home if v not in mine} | set(program.inputs)
    indices = needed(program.top, set(wanted), known)
    read = dict.fromkeys(v for e in program.top.equations if e.index in indices for v in e.ins if v in known)
    return tuple(v for v in read if v is not None)
