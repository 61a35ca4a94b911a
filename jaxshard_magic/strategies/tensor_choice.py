"""Choice of the dimensions that tensor parallelism shards.

Candidates are combined to sets without two dimensions of one tensor. Rules score a set by the FLOPs of the covered
products, the bytes of the caused sums, and the bytes gathered for splits of sharded dimensions. Dimensions of equal
blocks are chosen together. If a split leaves the best set open, Shardy is asked for the bytes of each set. This costs
a lowering, 0.4 s for 2,500 equations, and up to 0.6 s for each set; the rules cost nothing measurable.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from ..program.dimensions import Dimensions
from ..program.flops import Product
from ..program.primitives.primitive import Kind
from ..program.shardy import ShardyPartitioner
from ..program.sizes import nbytes
from .layout import Layout

_MAX_STARTS = 40  # starts of the greedy choice
_FREE_SHARE = 0.02  # share of the products' result bytes: sending less is no reason to cover fewer products
_MAX_ASKED = 4  # sets that Shardy is asked about, which takes up to a second each for a large step


@dataclass(frozen=True)
class _ClassSet:
    """Dimension classes to shard, scored by squared FLOPs for each byte sent by a device.

    Attributes:
        classes: The dimension classes.
        flops: FLOPs of the covered products.
        score: Score if equations splitting a sharded dimension gather the whole array.
        best_score: Score if devices exchange their parts instead; equal to `score` without splits.
    """

    classes: frozenset[int]
    flops: int
    score: float
    best_score: float


def choose_classes(layout: Layout, weight_products: list[Product], n: int, given: set[int]) -> frozenset[int]:
    """Return the dimension classes to shard over `n` devices.

    The set with the most squared FLOPs for each byte wins. If a vocabulary does not divide, the residual stream is
    still no better choice: sharded, it covers the head as well, but sums the width of a hidden layer where Megatron
    sums the model's.

    Args:
        layout: The layout.
        weight_products: The products of the step, with their weights.
        n: Number of devices.
        given: Classes already chosen by the user; part of the result.
    """
    sets = sorted(_ClassSets(layout, weight_products, n, given).sets(), key=lambda s: -s.score)
    if not sets:
        return frozenset(given)
    best = sets[0]
    # Only the bytes of splits are uncertain: ask about sets that would win if devices exchange parts there.
    rivals = [s for s in sets[1:] if s.best_score > best.score][: _MAX_ASKED - 1]
    partitioner = ShardyPartitioner.for_program(layout.program) if rivals else None
    if partitioner is None:
        return best.classes
    judged = list[tuple[float, _ClassSet]]()
    for s in (best, *rivals):
        division = partitioner.divide(_divided_inputs(layout, s.classes, n), n)
        if division is not None:
            judged.append((s.flops**2 / max(1, _free_bytes(weight_products) + division.sent_bytes_per_device), s))
    return max(judged, key=lambda pair: pair[0], default=(0, best))[1].classes


class _ClassSets:
    """Maximal sets of candidates without two classes of one tensor."""

    def __init__(self, layout: Layout, weight_products: list[Product], n: int, given: set[int]):
        self._products, self._given, self._n = weight_products, given, n
        self._candidates = divisible_classes(layout, weight_products, n) | given
        self._conflicts = defaultdict[int, set[int]](set)
        self._covered = defaultdict[int, set[int]](set)
        self._summed_bytes = Counter[int]()
        for k, p in enumerate(weight_products):
            for tensor in p.dim_classes:
                for a, b in itertools.permutations(set(tensor) & self._candidates, 2):
                    self._conflicts[a].add(b)
            for c in self._candidates & {c for t in p.dim_classes for c in t} if p.weight_operands else ():
                self._covered[c].add(k)
            for c in p.contracted & self._candidates:
                self._summed_bytes[c] += p.out_bytes
        self._split_bytes = _split_bytes_by_class(layout, self._candidates)
        self._kind_of = _kinds_of_classes(layout, self._candidates)
        self._kinds = defaultdict[Hashable, set[int]](set)
        for c, kind in self._kind_of.items():
            self._kinds[kind].add(c)

    def sets(self) -> list[_ClassSet]:
        """Return greedy sets from several orders: fewest conflicts first, fewest bytes for each FLOP first, each kind
        first."""
        order = self._sorted_candidates(lambda c: (len(self._conflicts[c]), self._cost(c)))
        cheap = self._sorted_candidates(lambda c: (self._cost(c) / max(1, self._flops(self._covered[c])),))
        starts = itertools.chain([(), order[::-1], cheap], self._starts(order))
        sets = {s.classes: s for s in (self._extend([*start, *order]) for start in starts)}
        return [s for s in sets.values() if s.score > 0]

    def _sorted_candidates(self, key: Callable[[int], tuple[float, ...]]) -> list[int]:
        """Return the candidates sorted by the largest key of their kind, with each kind consecutive."""
        # Equal blocks of a model must get equal layouts.
        most = {k: max(map(key, kind)) for k, kind in self._kinds.items()}
        kinds = sorted(self._kinds, key=lambda k: (most[k], min(self._kinds[k])))
        return [c for k in kinds for c in sorted(self._kinds[k], key=lambda c: (key(c), c))]

    def _starts(self, order: list[int]) -> Iterator[Iterable[int]]:
        """Yield all classes of each kind; where some of a kind conflict, the kind once from each of its classes."""

        def starts() -> Iterator[Iterable[int]]:
            for kind in dict.fromkeys(self._kind_of[c] for c in order):
                members = [c for c in order if self._kind_of[c] == kind]
                if any(self._conflicts[c] & self._kinds[kind] for c in members):
                    yield from ([c, *members] for c in members)
                else:
                    yield members

        return itertools.islice(starts(), _MAX_STARTS)

    def _extend(self, priorities: list[int]) -> _ClassSet:
        """Return the set of the classes that, in order, conflict with none taken before and cover another product."""
        taken = set(self._given)
        done = set[int]().union(*(self._covered[c] for c in taken))
        for c in dict.fromkeys(priorities):
            if not self._conflicts[c] & taken and self._covered[c] - done:
                taken.add(c)
                done |= self._covered[c]
        flops, free = self._flops(done), _free_bytes(self._products)
        gathered, exchanged = (sum(self._cost(c, share) for c in taken) for share in (1, 1 / self._n))
        score, best_score = (flops**2 / max(1, free + cost) for cost in (gathered, exchanged))
        return _ClassSet(frozenset(taken), flops, score, best_score)

    def _cost(self, c: int, share: float = 1) -> float:
        """Return the bytes that a device sends for a class: twice the bytes of sums (a ring), and a `share` of split
        values."""
        return (2 * self._summed_bytes[c] + share * self._split_bytes[c]) * (self._n - 1) / self._n

    def _flops(self, covered: Iterable[int]) -> int:
        return sum(self._products[k].flops for k in covered)


def divisible_classes(layout: Layout, weight_products: list[Product], n: int) -> set[int]:
    """Return the dimension classes of weights that divide over `n` devices, without those that count experts."""
    dims = layout.dims

    def divides(c: int) -> bool:
        whole = all(z % n == 0 for z in dims.all_sizes[c] if z > 1)
        return whole and dims.largest[c] > 1 and c not in layout.batch.classes and c not in dims.scanned

    experts = frozenset[int]() if layout.experts is None else layout.experts.classes
    return {c for c in weight_classes(dims, weight_products) - experts if divides(c)}


def weight_classes(dims: Dimensions, weight_products: list[Product]) -> set[int]:
    """Return the dimension classes of weights, without numbers of experts and without dimensions under a window.

    Sharded experts are another form of parallelism: it sums the results of a row over devices of which one has its
    expert. A sharded window needs a halo exchange, and partitioners get strided, dilated or transposed convolutions
    wrong.
    """
    groups = {c for p in weight_products for c in p.groups}
    return {c for p in weight_products for k in p.weight_operands for c in p.dim_classes[k]} - groups - dims.windowed


def _free_bytes(weight_products: list[Product]) -> float:
    """Return the bytes too few to be worth covering fewer products for."""
    return _FREE_SHARE * sum(p.out_bytes for p in weight_products)


def _kinds_of_classes(layout: Layout, classes: Iterable[int]) -> dict[int, Hashable]:
    """Return the kind of each class: the dimensions that it is, of parameters of the same shapes. Equal blocks share a
    kind."""
    dims_of_class = defaultdict[int, Counter[Hashable]](Counter)
    for i in layout.roles.storage_order:
        if i in layout.roles.weights:
            value = layout.program.inputs[i]
            for d, c in enumerate(layout.dims.classes_of(value)):
                dims_of_class[c][layout.program.shapes[value], d] += 1
    return {c: frozenset(dims_of_class[c].items()) or c for c in classes}


def _split_bytes_by_class(layout: Layout, classes: set[int]) -> Counter[int]:
    """Return the bytes of activations with a dimension that an equation splits, by the class of the dimension.

    Examples are rotated halves, stacked keys and values, and heads that do not divide. The dimension must be whole
    there.
    """
    dims, program = layout.dims, layout.program
    split_bytes = Counter[int]()
    for e in program.equations:
        if e.primitive.kind is not Kind.SLICE and e.name != "reshape":
            continue
        for v in dict.fromkeys(e.operands):
            if v is not None and layout.is_activation(v):
                after = {c for out in e.results for c in dims.classes_of(out)}
                for c in {c for c in dims.nontrivial_classes(v) if c is not None and c not in after} & classes:
                    split_bytes[c] += e.trip_count * nbytes(program.avals[v])
    return split_bytes


def _divided_inputs(layout: Layout, classes: frozenset[int], n: int) -> dict[int, int]:
    """Return the dimension of each stored input that sharding `classes` shards."""
    divided = dict[int, int]()
    for i in layout.roles.storage_order:
        value = layout.program.inputs[i]
        sizes = layout.program.shapes[value]
        for d, c in enumerate(layout.dims.classes_of(value)):
            if c in classes and sizes[d] % n == 0:
                divided.setdefault(i, d)
    return divided
