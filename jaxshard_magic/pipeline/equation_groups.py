"""Groups of outer-program equations, each on the rank with most of its input bytes, and their order.

A parameter, its gradient and its moments belong together, and so do arrays with the same rows: `ValueClasses` are the
equivalence classes of a step's values.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..program.flow import dependents, required_equations
from ..program.ir import Equation, Program, Value
from ..program.sizes import nbytes
from ..program.union_find import UnionFind


class ValueClasses:
    """Classes of values with one shape that are computed from each other element by element.

    A parameter, its gradient and its optimizer moments form one class.

    Args:
        step: The program to classify, at its top level.
        rows: Also merge values with the same number of rows (first dimension) that are computed from each other row by
            row, such as the factors of a factored second moment.
    """

    def __init__(self, step: Program, *, rows: bool = False):
        self._sets = UnionFind(len(step.avals))
        shapes = step.shapes
        spread: set[Value] = set()
        for e in step.top.equations:
            own = shapes[e.results[0]] if e.results else ()
            if rows and is_rowwise(e, step):
                self._merge_all(v for v in (*e.operands, *e.results) if v is not None)
            # Equations of unrelated classes may read the result of one broadcast, such as zeros: their classes are not
            # merged through it.
            elif e.name == "broadcast_in_dim":
                spread.update(e.results)
            elif e.primitive.is_elementwise and own:
                same = (v for v in (*e.operands, *e.results) if v is not None and shapes[v] == own)
                self._merge_all(v for v in same if v not in spread)

    def merge(self, v: Value, w: Value) -> None:
        """Merge the classes of two values."""
        self._sets.union(v, w)

    def class_of(self, v: Value) -> Value:
        """Return the representative of the class that contains `v`."""
        return self._sets.find(v)

    def _merge_all(self, values: Iterable[Value]) -> None:
        for v, w in pairwise(values):
            self.merge(v, w)


def is_rowwise(e: Equation, program: Program) -> bool:
    """Return whether a non-elementwise equation computes each row of its result from the same row of its operands."""
    if len(e.results) != 1 or any(v is None for v in e.operands):
        return False
    rows = {program.shapes[v][:1] for v in (*e.operands, *e.results) if v is not None}
    if len(rows) != 1 or () in rows:
        return False
    if (c := e.contraction) is not None:
        return (0, 0, 0) in c.batch
    if e.factors is not None:
        return e.factors.unsplit_dim(0) == 0
    return e.primitive.is_combinable and 0 not in e.params["axes"]


@dataclass(frozen=True)
class EquationGroup:
    """Equations that run together on one rank.

    Attributes:
        phase: Number of gradient calls finished before the group.
        level: Order within the phase: one more than any group of another rank that the group reads.
        rank: The rank.
        outputs: Values read by other groups, or results.
        inputs: Values that the group reads and does not compute.
    """

    phase: int
    level: int
    rank: int
    outputs: tuple[Value, ...]
    inputs: tuple[Value, ...]


@dataclass(frozen=True)
class RankAssignment:
    """Ranks of values, and groups.

    Attributes:
        rank_of_value: Rank of each result of a gradient call, value computed by a group, and input that is not
            replicated.
        groups: The groups, in execution order.
    """

    rank_of_value: Mapping[Value, int]
    groups: tuple[EquationGroup, ...]


def assign_ranks(
    program: Program,
    results: Sequence[Mapping[Value, int]],
    reader_ranks: Mapping[Value, int],
    state_pairs: Iterable[tuple[Value, Value]],
    default_rank: int,
    operands: Sequence[Collection[Value]],
    replicated: Iterable[Value] = (),
) -> RankAssignment:
    """Assign all equations of the outer program to ranks.

    Args:
        program: The outer program.
        results: For each gradient call, the rank of each result.
        reader_ranks: Ranks on which losses read inputs, used for inputs without a gradient's rank.
        state_pairs: Pairs of an input and the output that replaces it in the next step.
        default_rank: Rank for values that belong nowhere.
        operands: For each gradient call, the values that it reads.
        replicated: Inputs on every rank, such as the batch.
    """
    kinds, pairs = ValueClasses(program), list(state_pairs)
    result_ranks = {v: place for each in results for v, place in each.items()}
    for i, o in pairs:
        kinds.merge(i, o)
    array_ranks = {v: place for v, place in reader_ranks.items() if program.shapes[v]}
    # The right operand of `|` wins: the rank of a gradient over the ranks of readers.
    rank_of_class = _agreed_ranks(kinds, array_ranks) | _agreed_ranks(
        kinds, {v: p for v, p in result_ranks.items() if program.shapes[v]}
    )
    at, unplaced = dict(result_ranks), set(replicated)
    inputs = [v for v in program.inputs if v not in at and v not in unplaced]
    for v in inputs:
        place = rank_of_class.get(kinds.class_of(v), reader_ranks.get(v))
        if place is not None:
            at[v] = place
    _place_new_state(program, at, pairs, default_rank)
    at |= {v: default_rank for v in inputs if v not in at}
    groups = _GroupBuilder(program, at, results, default_rank, operands)
    state = {o: at[i] for i, o in pairs if i in at}
    read = {v: reader_ranks.get(v, default_rank) for v in sorted(set().union(*operands))}
    ends = {v: state.get(v, default_rank) for v in program.outputs if v is not None}
    return RankAssignment(groups.at, groups.make_groups(ends | read))


def _agreed_ranks(kinds: ValueClasses, places: Mapping[Value, int]) -> dict[Value, int]:
    """Return the rank of each class with all values on one rank."""
    at_of: dict[Value, set[int]] = defaultdict(set)
    for v, place in places.items():
        at_of[kinds.class_of(v)].add(place)
    return {kind: min(at) for kind, at in at_of.items() if len(at) == 1}


def _place_new_state(program: Program, at: dict[Value, int], pairs: Sequence[tuple[Value, Value]], last: int) -> None:
    """Assign state without a rank to the rank on which its next value is computed."""
    while True:
        made = dict(at)
        for e in program.top.equations:
            read = {v for v in e.operands if v in made}
            if read and not made.keys() & set(e.results):
                made.update(dict.fromkeys(e.results, _rank_of_most_bytes(program, read, made, last)))
        more = {i: made[o] for i, o in pairs if i not in at and o in made}
        if not more:
            return
        at |= more


_Key = tuple[int, int, int]  # phase, level and rank of a group


class _GroupBuilder:
    """Divide the equations of the outer program into groups; completes `at`.

    Values without a source on any rank, and arrays computed from scalars alone, belong to no group: each group that
    reads them computes them.
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
        self._ready_phase = {v: call for call, given in enumerate(results, 1) for v in given}
        self._last_call_before: dict[Value | None, int] = {}
        for call, given in enumerate(results, 1):
            self._last_call_before.update(dict.fromkeys(dependents(program.top, given), call))
        self._first_reading_call: dict[int, int] = {}  # by equation index, the first call that needs it
        for call, read in reversed(list(enumerate(operands))):
            self._first_reading_call.update(dict.fromkeys(required_equations(program.top, read, program.inputs), call))
        # For values without a rank: the values with a rank from which they are computed.
        self._placed_sources: dict[Value, frozenset[Value]] = {}
        self._level: dict[Value, int] = defaultdict(int)
        self._readers: dict[Value, set[_Key]] = defaultdict(set)
        self._group_of_value: dict[Value, _Key] = {}
        self._group_values: dict[_Key, list[Value]] = defaultdict(list)
        for e in program.top.equations:
            self._assign(e, last)

    def _sources(self, values: Iterable[Value | None]) -> frozenset[Value]:
        read = {v for v in values if v is not None}
        return frozenset(read & self.at.keys()).union(*(self._placed_sources.get(v, ()) for v in read))

    def _assign(self, e: Equation, last: int) -> None:
        sources, shapes = self._sources(e.operands), self.program.shapes
        if not any(shapes[v] for v in sources) and (not sources or any(shapes[v] for v in e.results)):
            self._placed_sources.update(dict.fromkeys(e.results, sources))
            return
        place = _rank_of_most_bytes(self.program, sources, self.at, last)
        phase = self._phase(e, sources)
        levels = (self._level[v] + (self.at[v] != place) for v in sources if self._ready_phase.get(v, 0) == phase)
        key = (phase, max(levels, default=0), place)
        for v in e.results:
            self.at[v], self._level[v], self._group_of_value[v], self._ready_phase[v] = (place, key[1], key, phase)
        self._group_values[key] += e.results
        for v in sources:
            self._readers[v].add(key)

    def _phase(self, e: Equation, sources: Iterable[Value]) -> int:
        """Return the phase of an equation that reads `sources`."""
        if e.index in self._first_reading_call:
            # Operands of a gradient call are computed right before the call.
            return self._first_reading_call[e.index]
        arrays = any(self.program.shapes[v] for v in e.results)
        # Dependents of a call's results follow right after the call, so that gradients take no memory during the next
        # call. Other scalars run before all calls, other arrays after all: earlier, they would take memory during the
        # calls in addition to their sources.
        first = self._last_call_before.get(next(iter(e.results), None), len(self._operands) if arrays else 0)
        return max([first, *(self._ready_phase.get(v, 0) for v in sources)])

    def make_groups(self, output_ranks: Mapping[Value, int]) -> tuple[EquationGroup, ...]:
        """Return the groups in execution order.

        Args:
            output_ranks: Values to compute in any case, with the rank for values without a group.
        """
        computed, inputs = set(self._group_of_value), set(self.program.inputs)
        for v in output_ranks:
            if v in self.at or v in inputs:
                continue
            calls = (call for call, read in enumerate(self._operands) if v in read)
            phase = next(calls, len(self._operands))
            level = 1 + max((n for other, n, _ in self._group_values if other == phase), default=-1)
            key = self._group_of_value[v] = (phase, level, output_ranks[v])
            self._group_values[key].append(v)
            for source in self._placed_sources.get(v, ()):
                self._readers[source].add(key)
        self.at.update((v, self._group_of_value[v][2]) for v in output_ranks if v in self._group_of_value)
        groups = []
        for key in sorted(self._group_values):
            own_values = self._group_values[key]
            outputs = [v for v in own_values if v in output_ranks or self._readers[v] - {key}]
            if outputs:
                reads = _values_read(self.program, outputs, (computed | inputs) - set(own_values))
                groups.append(EquationGroup(*key, tuple(outputs), reads))
        return tuple(groups)


def _rank_of_most_bytes(program: Program, read: Iterable[Value], at: Mapping[Value, int], last: int) -> int:
    """Return the rank with most bytes of the arrays read. For scalars alone: their common rank, else `last`."""
    size: Counter[int] = Counter()
    for v in sorted(read):
        if program.shapes[v]:
            size[at[v]] += nbytes(program.avals[v])
    if size:
        return max(size, key=lambda place: (size[place], -place))
    places = {at[v] for v in read}
    return places.pop() if len(places) == 1 else last


def _values_read(program: Program, wanted: Iterable[Value], known: Collection[Value]) -> tuple[Value, ...]:
    """Return the known values that a group reads to compute `wanted`."""
    indices = required_equations(program.top, set(wanted), known)
    read = dict.fromkeys(v for e in program.top.equations if e.index in indices for v in e.operands if v in known)
    return tuple(v for v in read if v is not None)
