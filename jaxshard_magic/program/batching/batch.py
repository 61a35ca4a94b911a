"""Batch detection: the input dimensions that are the batch, by evidence in one trace.

Dimension classes without a dimension of a parameter are free. Candidates are free classes of data leaves that most
products with weights carry (their coverage). A class that is summed, sliced or paired with itself while another free
class of the data lives on is mixed: positions, pixels or channels inside of an example. The batch is the only candidate
that is never mixed, or that none outlives. Else Shardy estimates the traffic of dividing each (`shardy`): the batch is
the candidate that no stored input comes to carry and with the fewest bytes besides sums, since any sends sums of
gradients.

Rows may be joined to each other by the data: graph nodes, looked up by edges or multiplied with an adjacency matrix
(`_find_joins`). Each such row is made of others, so that none is an example on its own; they are divided like examples.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from ..dimensions import Dimensions
from ..ir import Equation, Value
from ..primitives import scan_counts
from ..primitives.primitive import Kind
from ..primitives.sharding_rules import axis_dims, reduced_dims
from ..roles import InputRoles
from ..shardy import ShardyDivision, ShardyPartitioner

_MIN_COVERAGE = 0.05  # fraction of the products; less says nothing about a batch
_RIVAL_COVERAGE = 0.5  # fraction of the best coverage from which other candidates are considered too
_MAX_SHARDY_CANDIDATES = 6  # Shardy takes up to a second for each in a large step
_AMBIGUITY_FACTOR = 1.25  # times the fewest bytes; another candidate within it makes the choice ambiguous


@dataclass(frozen=True)
class Batch:
    """Batch of a step. A wrong choice changes no numbers, only the traffic.

    Attributes:
        classes: Dimension classes of the batch.
        input_dims: Batch dimensions of each input that has some: data, or a random key for each example.
        unambiguous: False if another dimension would send at most a quarter more, or if Shardy can't tell.
        size: Number of examples; None without a batch, and for rows that are no examples on their own.
        joining_equation: Index of the first equation that looks rows up in each other; None if they are examples.
    """

    classes: frozenset[int]
    input_dims: Mapping[int, tuple[int, ...]]
    unambiguous: bool
    size: int | None
    joining_equation: int | None = None


@dataclass(frozen=True)
class _Candidate:
    """Evidence for one dimension class as the batch.

    Attributes:
        coverage: Fraction of the numbers computed by products with weights that have the class.
        looped: A loop steps over it, or `associative_scan` halves it repeatedly: time, or an epoch.
        mixing_count: Number of equations that mix it, or a part of it, while another free class lives on.
        leaf_count: Number of data leaf dimensions in the class.
        first_dim: Smallest position of the class in a data leaf.
        dim_class: The class.
        classes: The class and all classes that concatenation, slicing or microbatching make of it.
    """

    coverage: float
    looped: bool
    mixing_count: int
    leaf_count: int
    first_dim: int
    dim_class: int
    classes: frozenset[int]

    @property
    def rank(self) -> tuple[bool, int, int, float, int]:
        return self.looped, self.mixing_count, -self.leaf_count, -self.coverage, self.first_dim

    @property
    def is_mixed(self) -> bool:
        return self.looped or self.mixing_count > 0


def find_batch(dims: Dimensions, roles: InputRoles, user_dims: Mapping[int, tuple[int, ...]] | None = None) -> Batch:
    """Find the batch of a step.

    Args:
        dims: Dimension classes of the step.
        roles: Role of each input.
        user_dims: Batch dimensions set by the user, by input.
    """
    evidence = _Evidence(dims, roles)
    if user_dims:
        user_classes = {dims.classes_of(dims.program.inputs[i])[d] for i, ds in user_dims.items() for d in ds}
        classes = frozenset().union(*(evidence.derived_classes(c) for c in user_classes))
        unambiguous, first_class = True, next(iter(user_classes))
    else:
        classes, unambiguous, first_class = evidence.choose()
    joining_equation, index_classes = _find_joins(dims, roles, classes)
    if joining_equation is not None:
        classes = classes.union(*(evidence.derived_classes(c) for c in index_classes if c in evidence.leaf_dims))
    batch_dims = {}
    for i in sorted({*roles.data, *roles.random_keys, *(user_dims or ())}):
        batch_positions = tuple(
            d for d, c in enumerate(dims.nontrivial_classes(dims.program.inputs[i])) if c in classes
        )
        if batch_positions:
            batch_dims[i] = batch_positions
    if first_class is None or joining_equation is not None:
        return Batch(classes, batch_dims, unambiguous, None, joining_equation)
    shapes = ((dims.program.shapes[dims.program.inputs[i]], along) for i, along in batch_dims.items())
    # Not `dims.largest`: where a step merges examples and positions, that would count all tokens as examples.
    rows = [prod(shape[d] for d in along) for shape, along in shapes]
    return Batch(classes, batch_dims, unambiguous, min(rows, default=dims.largest[first_class]), None)


class _Evidence:
    """Evidence for the batch, collected from all equations of a step.

    Args:
        dims: Dimension classes of the step.
        roles: Role of each input.
    """

    def __init__(self, dims: Dimensions, roles: InputRoles):
        self.dims = dims
        inputs = dims.program.inputs
        self.param_classes = {c for i, v in enumerate(inputs) if i in roles.weights for c in dims.classes_of(v)}
        self.leaf_dims: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.stored_inputs = frozenset(roles.storage_order) - roles.data
        for i in sorted(roles.data or roles.random_keys):  # training mapped over random keys has no other data
            classes = dims.nontrivial_classes(inputs[i])
            if roles.is_raw_key(dims.program, i):
                # The last dimension of a raw key holds the words of one key.
                classes = classes[:-1]
            for d, c in enumerate(classes):
                if c is not None and c not in self.param_classes:
                    self.leaf_dims[c].append((i, d))
        self.data_classes = frozenset[int]().union(*(self.derived_classes(c) for c in self.leaf_dims))
        self.mixing_counts: Counter[int] = Counter()
        # Free classes in the results of equations that end a class.
        self.outlived_by: dict[int, set[int | None]] = defaultdict(set)
        self.products: list[tuple[int, frozenset[int]]] = []
        self._strided: list[tuple[int | None, int | None]] = []  # a class, and that of its every second element
        for e in dims.program.equations:
            self._record_equation(e)
        # `associative_scan` halves a dimension again and again: the class of a half is halved as well.
        halved = {c for c, _ in self._strided}
        self._looped = dims.scanned | {c for c, half in self._strided if half in halved}

    def is_free(self, c: int | None) -> bool:
        return c is not None and c not in self.param_classes

    def _record_equation(self, e: Equation) -> None:
        ins, outs = (
            [self.dims.nontrivial_classes(v) for v in e.operands],
            [self.dims.nontrivial_classes(v) for v in e.results],
        )
        if e.is_scan:
            consts, carried = scan_counts(e.params)
            self._count_mixing(c for k in ins[consts + carried :] for c in k[:1])
        if e.bodies:
            return
        if e.primitive.resizes_dims and (strides := e.params.get("strides")):
            self._strided += [(ins[0][d], outs[0][d]) for d, n in enumerate(strides) if n > 1 and ins[0]]
        for k in ins + outs:
            self._count_mixing(c for c, n in Counter(k).items() if n > 1 and self.is_free(c))
        ends = _ended_classes(e, ins, outs)
        live_classes = {c for k in outs for c in k if self.is_free(c)}
        if e.primitive.kind is Kind.CUMULATIVE:
            # A running reduction mixes a dimension that its result still has.
            live_classes -= ends
        # A class counts as mixed only while another class of the data lives on. Dimensions that the step makes, such as
        # an expert's slots for tokens, hold no examples.
        if live_classes & self.data_classes:
            free_ends = [c for c in ends if self.is_free(c)]
            self._count_mixing(c for c in free_ends if c not in live_classes)
            for c in free_ends:
                self.outlived_by[c] |= live_classes - {c}
        if e.primitive.is_product:
            self._record_product(e, ins, outs)

    def _count_mixing(self, classes: Iterable[int | None]) -> None:
        self.mixing_counts.update(c for c in classes if c is not None)

    def _record_product(self, e: Equation, ins: list, outs: list) -> None:
        frees = [{c for c in k if self.is_free(c)} for k in (*ins[:2], outs[0])]
        if all(frees):
            return  # both operands are activations: no weight
        size = prod(self.dims.program.shapes[e.results[0]])
        self.products.append((e.trip_count * size, frozenset().union(*frees)))

    def derived_classes(self, c: int) -> frozenset[int]:
        """Return `c` and all classes that concatenation, slicing or microbatching make of it."""
        return self.dims.related_classes(c, self.is_free)

    def choose(self) -> tuple[frozenset[int], bool, int | None]:
        """Return the batch classes, whether the choice is unambiguous, and the first class chosen."""
        batch: set[int] = set()
        first: int | None = None
        unambiguous, remaining = True, list(self.products)
        total = sum(w for w, _ in remaining) or 1
        while remaining:
            candidates = self.leaf_dims if first is None else {c for _, k in remaining for c in k}
            size = self.dims.largest[first] if first is not None else 0
            choices = [self._candidate(c, remaining, total) for c in candidates if self._has_fitting_size(c, size)]
            best_coverage = max((x.coverage for x in choices), default=0)
            if best_coverage < _MIN_COVERAGE:
                batch |= self._uncovered_classes(batch, choices) if first is not None else set()
                break
            ranked = sorted((x for x in choices if x.coverage >= _RIVAL_COVERAGE * best_coverage), key=lambda x: x.rank)
            best = ranked[0]
            if first is None:
                best, unambiguous = self._select(ranked)
                first = best.dim_class
            batch |= best.classes
            remaining = [(w, k) for w, k in remaining if not k & best.classes]
        if first is None and self.leaf_dims and not self.products:
            return self._choose_without_products()
        return frozenset(batch), unambiguous, first

    def _uncovered_classes(self, batch: set[int], choices: list[_Candidate]) -> set[int]:
        """Return classes of little coverage that are alone in data leaves without a batch: labels of whole graphs."""
        batchy = {i for c in batch for i, _ in self.leaf_dims.get(c, ())}
        alone = [
            x
            for x in choices
            if x.coverage and x.leaf_count and not batchy & {i for i, _ in self.leaf_dims[x.dim_class]}
        ]
        return {c for x in alone for c in x.classes}

    def _choose_without_products(self) -> tuple[frozenset[int], bool, int | None]:
        """Choose a batch where no product has a trained weight: a prediction, or a training mapped over keys."""
        choices = sorted((self._candidate(c, [], 1) for c in self.leaf_dims), key=lambda x: x.rank)
        best, clear = self._select(choices)
        return best.classes, clear, best.dim_class

    def _select(self, ranked: list[_Candidate]) -> tuple[_Candidate, bool]:
        """Return the batch among choices of similar coverage, and whether it is unambiguous.

        Args:
            ranked: The choices, best rank first.
        """
        unmixed = [x for x in ranked if not x.is_mixed] or ranked
        if len(unmixed) > 1:
            unmixed = [
                x for x in ranked if not x.looped and not any(self._is_within_example(x, y) for y in ranked)
            ] or ranked
        return (unmixed[0], True) if len(unmixed) == 1 else self._select_by_traffic(unmixed)

    def _is_within_example(self, x: _Candidate, y: _Candidate) -> bool:
        """Return whether `x` ends where `y` lives on, and `y` never where `x` does: `x` are positions inside of
        examples."""

        def outlives(a: _Candidate, b: _Candidate) -> bool:
            return any(self.outlived_by[c] & a.classes for c in b.classes)

        return not y.looped and outlives(y, x) and not outlives(x, y)

    def _select_by_traffic(self, choices: list[_Candidate]) -> tuple[_Candidate, bool]:
        """Return the choice that moves the fewest bytes when divided, and whether all others would send clearly more.

        Choices that a stored input comes to carry are left out. The first choice, ambiguous, if Shardy can't tell.
        """
        # One device sends nothing, whatever the batch is.
        if self.dims.max_axis_size == 1:
            return choices[0], True
        partitioner = ShardyPartitioner.for_program(self.dims.program)
        if partitioner is None:
            return choices[0], False
        divisions = list[tuple[_Candidate, ShardyDivision]]()
        for x in choices[:_MAX_SHARDY_CANDIDATES]:
            dims = {i: d for c in x.classes for i, d in reversed(self.leaf_dims.get(c, ()))}
            division = partitioner.divide(dims, self.dims.max_axis_size)
            if division is not None and not division.divided_inputs & self.stored_inputs:
                divisions.append((x, division))
        if not divisions:
            return choices[0], False
        # Any choice sends sums of gradients, so the other bytes are compared first.
        best, least = min(
            divisions, key=lambda pair: (pair[1].bytes_without_sums, pair[1].total_bytes)
        )  # `min` returns the first of equals, which has the best rank
        rivals = [other for x, other in divisions if not x.classes & best.classes]
        similar = (
            x.bytes_without_sums <= _AMBIGUITY_FACTOR * least.bytes_without_sums
            and x.total_bytes <= _AMBIGUITY_FACTOR * least.total_bytes
            for x in rivals
        )
        return best, not any(similar)

    def _has_fitting_size(self, c: int, size: int) -> bool:
        """Return whether a class has a size that `size` divides, or that divides `size`; a size of 0 fits any."""
        mine = self.dims.largest[c]
        return not size or mine % size == 0 or size % mine == 0

    def _candidate(self, c: int, todo: list, total: int) -> _Candidate:
        reach = self.derived_classes(c)
        cover = sum(w for w, k in todo if k & reach) / total
        inner = sum(self.mixing_counts[x] for x in reach)
        leaves = self.leaf_dims.get(c, [])
        looped = bool(reach & self._looped)
        return _Candidate(cover, looped, inner, len(leaves), min((d for _, d in leaves), default=9), c, reach)


def _ended_classes(e: Equation, ins: list, outs: list) -> set:
    """Return classes that an equation sums, runs over, contracts, slices or sees through a window."""
    if (c := e.contraction) is not None:
        summed = {ins[0][d] for d, *_ in (*c.contracted, *c.windowed) if ins[0]}
        return summed | {outs[0][d] for _, _, d in c.windowed}
    if e.primitive.kind is Kind.REDUCTION:
        return {ins[0][d] for d in reduced_dims(e.params) if ins[0]}
    if e.primitive.kind is Kind.CUMULATIVE:
        return {ins[0][d] for d in axis_dims(e.params, len(ins[0]))}
    if e.primitive.has_axis or e.primitive.resizes_dims:
        pairs = ((k, d) for k in ins if len(k) == len(outs[0]) for d in range(len(k)))
        return {k[d] for k, d in pairs if outs[0][d] != k[d]}
    return set()


def _find_joins(dims: Dimensions, roles: InputRoles, batch_classes: Collection[int]) -> tuple[int | None, set[int]]:
    """Return the first equation that looks the rows of a batch up in each other, and the classes of the indices.

    Args:
        dims: Dimension classes of the step.
        roles: Role of each input.
        batch_classes: Dimension classes of the batch.

    Returns:
        The index of the equation, None without one, and the classes of lookup indices (edges) and of what they are
        added up into (nodes again, or graphs).
    """
    program = dims.program
    data = {program.inputs[i] for i in roles.data}
    # An adjacency matrix has the batch in two dimensions.
    adjacency_inputs = {v for v in data if len([c for c in dims.nontrivial_classes(v) if c in batch_classes]) > 1}
    first, index_classes, sums = None, set[int](), list[tuple[int, set[int]]]()
    for e in program.equations:
        lookup_classes = {dims.classes_of(v)[d] for v, d in _data_lookups(dims, e, data)}
        if not lookup_classes.isdisjoint(batch_classes):
            index_classes |= _index_row_class(dims, e.operands[1])
        if e.primitive.is_additive and lookup_classes:
            sums += [(c, lookup_classes) for c in _index_row_class(dims, e.operands[1])]
        joins = not lookup_classes.isdisjoint(batch_classes) or (
            e.primitive.is_product and _reads_any(dims, e, adjacency_inputs)
        )
        first = e.index if first is None and joins else first
    return first, index_classes.union(*(into for c, into in sums if c in index_classes or c in batch_classes))


def _data_lookups(dims: Dimensions, e: Equation, data: Collection[Value]) -> Iterator[tuple[Value, int]]:
    """Find the dimensions that an equation looks up in, or adds into, by integers of the data.

    Leaves out dimensions whose rows are each looked up by their own number.
    """
    if e.primitive.kind is not Kind.LOOKUP:
        return
    indices, index, numbers = dims.links.indices, e.operands[1], e.params["dimension_numbers"]
    if e.primitive.is_gather:
        table, indexed_dims = e.operands[0], numbers.start_index_map
    else:
        table, indexed_dims = e.results[0], numbers.scatter_dims_to_operand_dims
    if index is None or table is None or indices.input_origins(index).isdisjoint(data):
        return
    for column, d in enumerate(indexed_dims):
        # An iota looks each row up by its own number, as in `logits[arange(n), labels]`.
        if indices.iota_dim(index, column) is None:
            yield table, d


def _index_row_class(dims: Dimensions, index: Value | None) -> set[int]:
    """Return the class that counts the rows of an index; the longest of several."""
    rows = [c for c in dims.nontrivial_classes(index)[:-1] if c is not None]
    return {max(rows, key=lambda c: dims.largest[c])} if rows else set()


def _reads_any(dims: Dimensions, e: Equation, inputs: Collection[Value]) -> bool:
    """Return whether an equation reads one of these inputs, also in a loop or with another dtype."""
    return any(not dims.links.indices.input_origins(v).isdisjoint(inputs) for v in e.operands[:2])
