"""The batch of a step: which dimension of which input, by evidence.

Dimension classes that no parameter has are free. Candidates are the free classes of data leaves that most of the
products with weights carry (their cover). A class that is summed, sliced or paired with itself while another free class
of the data lives on is mixed: positions, pixels or channels inside of an example. Where one candidate alone is never
mixed, or none outlives it, it is the batch. Else Shardy is asked what dividing each would send (`shardy`): the batch
is the one that no stored input comes to carry and that sends the fewest bytes that are no sums, since any sends sums of
gradients. Rows that the data joins to each other, as edges do the nodes of a graph, are divided like examples and are
none (`joins`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ..dimensions import Dimensions
from ..ir import Equation
from ..primitives import scan_counts
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import along, reduced
from ..roles import PARAMS, Roles
from ..shardy import Division, Partitioner
from .joins import find_joins

_ENOUGH = 0.05  # of the products: less says nothing about a batch
_RIVAL = 0.5  # of the best cover: what is also looked at
_ASKED = 6  # candidates that Shardy is asked about, at most: each takes up to a second of a large step
_CLOSE = 1.25  # times the fewest bytes that are moved: another dimension would do nearly as well


@dataclass(frozen=True)
class Batch:
    """`classes`: the dimension classes that are the batch. `dims[i]`: the batch dimensions of input i, data or a random
    key for each example.

    `clear` is False where another dimension would do nearly as well: a wrong choice changes no numbers, only
    what moves. `size` is the number of examples, None where no batch was found and where its rows are none by
    themselves: `joined` is then the equation, by its index, that first looks them up in each other.
    """

    classes: frozenset[int]
    dims: Mapping[int, tuple[int, ...]]
    clear: bool
    size: int | None
    joined: int | None = None


@dataclass(frozen=True)
class _Choice:
    cover: float
    looped: bool  # a loop steps over it, or `associative_scan`, which halves it again and again: time, or an epoch
    inner: int  # equations that mix it, or a part of it, while another free class lives on
    leaves: int
    first_dim: int
    cls: int
    reach: frozenset[int]

    @property
    def rank(self) -> tuple[bool, int, int, float, int]:
        return self.looped, self.inner, -self.leaves, -self.cover, self.first_dim

    @property
    def mixed(self) -> bool:
        return self.looped or self.inner > 0


def find_batch(dims: Dimensions, roles: Roles, given: Mapping[int, tuple[int, ...]] | None = None) -> Batch:
    """The batch of a step; `given` names dimensions of inputs that the user says are the batch."""
    evidence = _Evidence(dims, roles)
    if given:
        named = {dims.of(dims.program.inputs[i])[d] for i, ds in given.items() for d in ds}
        classes = frozenset().union(*(evidence.reach(c) for c in named))
        clear, first = True, next(iter(named))
    else:
        classes, clear, first = evidence.choose()
    joined, beside = find_joins(dims, roles, classes)
    if joined is not None:
        classes = classes.union(*(evidence.reach(c) for c in beside if c in evidence.leaves))
    batch_dims = {}
    for i in sorted({*roles.data, *roles.keys, *(given or ())}):
        batchy = tuple(d for d, c in enumerate(dims.big(dims.program.inputs[i])) if c in classes)
        if batchy:
            batch_dims[i] = batchy
    if first is None or joined is not None:
        return Batch(classes, batch_dims, clear, None, joined)
    shapes = ((dims.program.shapes[dims.program.inputs[i]], along) for i, along in batch_dims.items())
    # Not the largest there is of the class: tokens of all examples are one dimension where a step puts them in one row.
    rows = [prod(shape[d] for d in along) for shape, along in shapes]
    return Batch(classes, batch_dims, clear, min(rows, default=dims.largest[first]), None)


class _Evidence:
    def __init__(self, dims: Dimensions, roles: Roles):
        self.dims = dims
        inputs = dims.program.inputs
        self.bound = {c for i, v in enumerate(inputs) if roles.of[i] == PARAMS for c in dims.of(v)}
        self.leaves: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.stored = frozenset(roles.stored) - roles.data
        for i in sorted(roles.data or roles.keys):  # a training mapped over keys has no other data
            classes = dims.big(inputs[i])
            if roles.is_raw_key(dims.program, i):
                classes = classes[:-1]
            for d, c in enumerate(classes):
                if c is not None and c not in self.bound:
                    self.leaves[c].append((i, d))
        self.given = frozenset[int]().union(*(self.reach(c) for c in self.leaves))
        self.inner: Counter[int] = Counter()
        # Free classes that live on where a class ends.
        self.outlived: dict[int, set[int | None]] = defaultdict(set)
        self.products: list[tuple[int, frozenset[int]]] = []
        self._strided: list[
            tuple[int | None, int | None]
        ] = []  # a class, and that of every second of its places
        for e in dims.program.equations:
            self._look(e)
        halved = {c for c, _ in self._strided}
        self._looped = dims.looped | {c for c, half in self._strided if half in halved}

    def free(self, c: int | None) -> bool:
        return c is not None and c not in self.bound

    def _look(self, e: Equation) -> None:
        ins, outs = [self.dims.big(v) for v in e.ins], [self.dims.big(v) for v in e.outs]
        if e.is_scan:
            consts, carried = scan_counts(e.params)
            self._count(c for k in ins[consts + carried :] for c in k[:1])
        if e.doors:
            return
        if e.primitive.cuts and (strides := e.params.get("strides")):
            self._strided += [(ins[0][d], outs[0][d]) for d, n in enumerate(strides) if n > 1 and ins[0]]
        for k in ins + outs:
            self._count(c for c, n in Counter(k).items() if n > 1 and self.free(c))
        ends = _ends(e, ins, outs)
        living = {c for k in outs for c in k if self.free(c)}
        if e.primitive.kind is Kind.RUNNING:
            living -= ends
        if living & self.given:  # places that the step made, as an expert's for tokens, are no examples
            ended = [c for c in ends if self.free(c)]
            self._count(c for c in ended if c not in living)
            for c in ended:
                self.outlived[c] |= living - {c}
        if e.primitive.product:
            self._product(e, ins, outs)

    def _count(self, classes: Iterable[int | None]) -> None:
        self.inner.update(c for c in classes if c is not None)

    def _product(self, e: Equation, ins: list, outs: list) -> None:
        frees = [{c for c in k if self.free(c)} for k in (*ins[:2], outs[0])]
        if all(frees):
            return  # two activations: no weight in it
        size = prod(self.dims.program.shapes[e.outs[0]])
        self.products.append((e.trips * size, frozenset().union(*frees)))

    def reach(self, c: int) -> frozenset[int]:
        """`c` and what concatenating, slicing or microbatching makes of it."""
        return self.dims.reach(c, self.free)

    def choose(self) -> tuple[frozenset[int], bool, int | None]:
        batch: set[int] = set()
        first: int | None = None
        clear, todo = True, list(self.products)
        total = sum(w for w, _ in todo) or 1
        while todo:
            names = self.leaves if first is None else {c for _, k in todo for c in k}
            size = self.dims.largest[first] if first is not None else 0
            choices = [self._weigh(c, todo, total) for c in names if self._fits(c, size)]
            top = max((x.cover for x in choices), default=0)
            if top < _ENOUGH:
                batch |= self._beside(batch, choices) if first is not None else set()
                break
            good = sorted((x for x in choices if x.cover >= _RIVAL * top), key=lambda x: x.rank)
            best = good[0]
            if first is None:
                best, clear = self._best(good)
                first = best.cls
            batch |= best.reach
            todo = [(w, k) for w, k in todo if not k & best.reach]
        if first is None and self.leaves and not self.products:
            return self._without_products()
        return frozenset(batch), clear, first

    def _beside(self, batch: set[int], choices: list[_Choice]) -> set[int]:
        """Classes of little cover that stand alone in data leaves without a batch: labels of whole graphs."""
        batchy = {i for c in batch for i, _ in self.leaves.get(c, ())}
        alone = [
            x for x in choices if x.cover and x.leaves and not batchy & {i for i, _ in self.leaves[x.cls]}
        ]
        return {c for x in alone for c in x.reach}

    def _without_products(self) -> tuple[frozenset[int], bool, int | None]:
        """The batch where no product has a trained weight: a prediction, a training mapped over keys."""
        choices = sorted((self._weigh(c, [], 1) for c in self.leaves), key=lambda x: x.rank)
        best, clear = self._best(choices)
        return best.reach, clear, best.cls

    def _best(self, good: list[_Choice]) -> tuple[_Choice, bool]:
        """The batch among choices of like cover, best rank first, and whether that is clear."""
        apart = [x for x in good if not x.mixed] or good
        if len(apart) > 1:
            apart = [x for x in good if not x.looped and not any(self._is_inside(x, y) for y in good)] or good
        return (apart[0], True) if len(apart) == 1 else self._asked(apart)

    def _is_inside(self, x: _Choice, y: _Choice) -> bool:
        """Return whether `x` ends where `y` lives on, and `y` never where `x` does: positions of examples."""

        def outlives(a: _Choice, b: _Choice) -> bool:
            return any(self.outlived[c] & a.reach for c in b.reach)

        return not y.looped and outlives(y, x) and not outlives(x, y)

    def _asked(self, choices: list[_Choice]) -> tuple[_Choice, bool]:
        """The choice whose division moves the fewest bytes and that no stored input comes to carry, and whether all
        others would send clearly more; the first one, unclear, where Shardy can't tell."""
        if self.dims.most_devices == 1:
            return choices[0], True
        partitioner = Partitioner.of(self.dims.program)
        if partitioner is None:
            return choices[0], False
        judged = list[tuple[_Choice, Division]]()
        for x in choices[:_ASKED]:
            dims = {i: d for c in x.reach for i, d in reversed(self.leaves.get(c, ()))}
            division = partitioner.divided(dims, self.dims.most_devices)
            if division is not None and not division.carriers & self.stored:
                judged.append((x, division))
        if not judged:
            return choices[0], False
        best, least = min(judged, key=lambda pair: (pair[1].moved, pair[1].sent))  # the first of equals
        rivals = [other for x, other in judged if not x.reach & best.reach]
        close = (x.moved <= _CLOSE * least.moved and x.sent <= _CLOSE * least.sent for x in rivals)
        return best, not any(close)

    def _fits(self, c: int, size: int) -> bool:
        mine = self.dims.largest[c]
        return not size or mine % size == 0 or size % mine == 0

    def _weigh(self, c: int, todo: list, total: int) -> _Choice:
        reach = self.reach(c)
        cover = sum(w for w, k in todo if k & reach) / total
        inner = sum(self.inner[x] for x in reach)
        leaves = self.leaves.get(c, [])
        looped = bool(reach & self._looped)
        return _Choice(cover, looped, inner, len(leaves), min((d for _, d in leaves), default=9), c, reach)


def _ends(e: Equation, ins: list, outs: list) -> set:
    """Classes that this equation sums, runs over, contracts, slices or looks at through a window."""
    if (c := e.contraction) is not None:
        summed = {ins[0][d] for d, *_ in (*c.contracted, *c.windowed) if ins[0]}
        return summed | {outs[0][d] for _, _, d in c.windowed}
    if e.primitive.kind is Kind.REDUCTION:
        return {ins[0][d] for d in reduced(e.params) if ins[0]}
    if e.primitive.kind is Kind.RUNNING:
        return {ins[0][d] for d in along(e.params, len(ins[0]))}
    if e.primitive.along or e.primitive.cuts:
        pairs = ((k, d) for k in ins if len(k) == len(outs[0]) for d in range(len(k)))
        return {k[d] for k, d in pairs if outs[0][d] != k[d]}
    return set()
