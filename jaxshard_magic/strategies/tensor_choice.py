"""The dimensions that tensor parallelism divides: candidates, sets of them that fit together, and the best set.

Sets come from rules: which products a dimension covers, which dimensions meet in one tensor, what dividing it sums, and
what an equation that takes a divided dimension apart has to gather. Dimensions of equal blocks are chosen together.
Where such an equation leaves it open which set sends least, Shardy is asked what each would send (`program/shardy`).
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from ..program.dimensions import Dimensions
from ..program.primitives.primitive import Kind
from ..program.products import Product
from ..program.roles import PARAMS
from ..program.shardy import Partitioner
from ..program.sizes import nbytes
from .layout import Layout

_STARTS = 40  # sets that the greedy choice is started from
_FREE = 0.02  # of all products' bytes: to send less than that costs nothing worth covering less for
_ASKED = 4  # sets that Shardy is asked about: each takes up to a second of a large step


@dataclass(frozen=True)
class _Set:
    """Dimension classes to divide, and products' FLOPs squared for a byte that a device sends.

    Where an equation takes a divided dimension apart, `score` has all of its array gathered, `most` has devices
    exchange their parts of it; elsewhere they are equal.
    """

    classes: frozenset[int]
    flops: int
    score: float
    most: float


def choose(layout: Layout, found: list[Product], n: int, given: set[int]) -> frozenset[int]:
    """Return the dimension classes to divide over `n` devices, `given` ones among them.

    The set with the most FLOPs squared for a byte wins: a vocabulary that does not divide is no reason to divide the
    residual stream, which covers the head as well, but sums a hidden layer's width where Megatron sums the model's.
    """
    sets = sorted(_Sets(layout, found, n, given).all(), key=lambda s: -s.score)
    if not sets:
        return frozenset(given)
    best = sets[0]
    rivals = [s for s in sets[1:] if s.most > best.score][: _ASKED - 1]
    partitioner = Partitioner.of(layout.program) if rivals else None
    if partitioner is None:
        return best.classes
    judged = list[tuple[float, _Set]]()
    for s in (best, *rivals):
        division = partitioner.divided(_divided_inputs(layout, s.classes, n), n)
        if division is not None:
            judged.append((s.flops**2 / max(1, _free(found) + division.sent_per_device), s))
    return max(judged, key=lambda pair: pair[0], default=(0, best))[1].classes


class _Sets:
    """Sets of candidates of which no two meet in one tensor, and to which none can be added."""

    def __init__(self, layout: Layout, found: list[Product], n: int, given: set[int]):
        self._found, self._given, self._n = found, given, n
        self._can = candidates(layout, found, n) | given
        self._conflict = defaultdict[int, set[int]](set)
        self._cover = defaultdict[int, set[int]](set)
        self._sums = Counter[int]()
        for k, p in enumerate(found):
            for tensor in p.tensors:
                for a, b in itertools.permutations(set(tensor) & self._can, 2):
                    self._conflict[a].add(b)
            for c in self._can & {c for t in p.tensors for c in t} if p.weights else ():
                self._cover[c].add(k)
            for c in p.contracted & self._can:
                self._sums[c] += p.out_bytes
        self._apart = _taken_apart(layout, self._can)
        self._kind_of = _kinds(layout, self._can)
        self._kinds = defaultdict[Hashable, set[int]](set)
        for c, kind in self._kind_of.items():
            self._kinds[kind].add(c)

    def all(self) -> list[_Set]:
        """Greedy sets, in several orders: fewest conflicts, fewest bytes to send for a FLOP, each kind first."""
        order = self._order(lambda c: (len(self._conflict[c]), self._cost(c)))
        cheap = self._order(lambda c: (self._cost(c) / max(1, self._flops(self._cover[c])),))
        starts = itertools.chain([(), order[::-1], cheap], self._starts(order))
        sets = {s.classes: s for s in (self._fill([*start, *order]) for start in starts)}
        return [s for s in sets.values() if s.score > 0]

    def _order(self, key: Callable[[int], tuple[float, ...]]) -> list[int]:
        """The candidates by their kind's largest key, those of a kind beside each other: equal blocks lie equally."""
        most = {k: max(map(key, kind)) for k, kind in self._kinds.items()}
        kinds = sorted(self._kinds, key=lambda k: (most[k], min(self._kinds[k])))
        return [c for k in kinds for c in sorted(self._kinds[k], key=lambda c: (key(c), c))]

    def _starts(self, order: list[int]) -> Iterator[Iterable[int]]:
        """All dimensions of a kind together; where some of them meet, from each of these."""

        def starts() -> Iterator[Iterable[int]]:
            for kind in dict.fromkeys(self._kind_of[c] for c in order):
                members = [c for c in order if self._kind_of[c] == kind]
                if any(self._conflict[c] & self._kinds[kind] for c in members):
                    yield from ([c, *members] for c in members)
                else:
                    yield members

        return itertools.islice(starts(), _STARTS)

    def _fill(self, order: list[int]) -> _Set:
        """The set that taking each dimension in order gives, where it meets none taken and covers another product."""
        taken = set(self._given)
        done = set[int]().union(*(self._cover[c] for c in taken))
        for c in dict.fromkeys(order):
            if not self._conflict[c] & taken and self._cover[c] - done:
                taken.add(c)
                done |= self._cover[c]
        flops, free = self._flops(done), _free(self._found)
        gathered, exchanged = (sum(self._cost(c, share) for c in taken) for share in (1, 1 / self._n))
        score, most = (flops**2 / max(1, free + cost) for cost in (gathered, exchanged))
        return _Set(frozenset(taken), flops, score, most)

    def _cost(self, c: int, share: float = 1) -> float:
        """Bytes that a device sends: in a ring, a sum's twice; `share`: of what is taken apart."""
        return (2 * self._sums[c] + share * self._apart[c]) * (self._n - 1) / self._n

    def _flops(self, covered: Iterable[int]) -> int:
        return sum(self._found[k].flops for k in covered)


def candidates(layout: Layout, found: list[Product], n: int) -> set[int]:
    """The dimension classes of weights that `n` devices could divide."""
    dims = layout.dims

    def divides(c: int) -> bool:
        whole = all(z % n == 0 for z in dims.all_sizes[c] if z > 1)
        return whole and dims.largest[c] > 1 and c not in layout.batch.classes and c not in dims.looped

    experts = frozenset[int]() if layout.experts is None else layout.experts.classes
    return {c for c in weight_classes(dims, found) - experts if divides(c)}


def weight_classes(dims: Dimensions, found: list[Product]) -> set[int]:
    """Those of weights, but not the numbers of experts: dividing these is another parallelism, which sums a row's
    results over devices of which one has its expert. Nor what a window lies along: each device would need its
    neighbours' edges, which partitioners of strided, dilated or transposed convolutions get wrong."""
    groups = {c for p in found for c in p.groups}
    return {c for p in found for k in p.weights for c in p.tensors[k]} - groups - dims.windowed


def _free(found: list[Product]) -> float:
    return _FREE * sum(p.out_bytes for p in found)


def _kinds(layout: Layout, classes: Iterable[int]) -> dict[int, Hashable]:
    """The kind of each dimension class: which dimensions of parameters of which shapes it is. Those of equal blocks are
    of one kind."""
    places = defaultdict[int, Counter[Hashable]](Counter)
    for i in layout.roles.stored:
        if layout.roles.of[i] == PARAMS:
            value = layout.program.inputs[i]
            for d, c in enumerate(layout.dims.of(value)):
                places[c][layout.program.shapes[value], d] += 1
    return {c: frozenset(places[c].items()) or c for c in classes}


def _taken_apart(layout: Layout, classes: set[int]) -> Counter[int]:
    """Bytes of activations of which an equation takes a dimension apart, by its class: halves that are rotated, a stack
    of keys and values, heads that do not divide. Such a dimension has to be whole there."""
    dims, program = layout.dims, layout.program
    found = Counter[int]()
    for e in program.equations:
        if e.primitive.kind is not Kind.CUT and e.name != "reshape":
            continue
        for v in dict.fromkeys(e.ins):
            if v is not None and layout.batchy(v):
                after = {c for out in e.outs for c in dims.of(out)}
                for c in {c for c in dims.big(v) if c is not None and c not in after} & classes:
                    found[c] += e.trips * nbytes(program.avals[v])
    return found


def _divided_inputs(layout: Layout, classes: frozenset[int], n: int) -> dict[int, int]:
    """The dimension of each stored input that dividing these classes divides."""
    divided = dict[int, int]()
    for i in layout.roles.stored:
        value = layout.program.inputs[i]
        sizes = layout.program.shapes[value]
        for d, c in enumerate(layout.dims.of(value)):
            if c in classes and sizes[d] % n == 0:
                divided.setdefault(i, d)
    return divided
