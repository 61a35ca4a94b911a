"""Equivalence classes of dimensions: one logical dimension, or one storage layout.

Dimensions are joined by links, read from the sharding rules of all equations: a link says that two dimensions are the
same dimension.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .flow import transitive_closure
from .ir import Equation, Program, Value
from .lookup_indices import LookupIndices
from .primitives.sharding_rules import SlotDim
from .union_find import UnionFind


class DimensionLink(NamedTuple):
    """Equality of two dimensions.

    Attributes:
        a: Number of a dimension.
        b: Number of another dimension.
        equation: Index of the equation; None where a value enters or leaves a body or goes round a loop, and between a
            copy and its original.
        same_storage: Whether both values are stored with the same layout, too.
    """

    a: int
    b: int
    equation: int | None
    same_storage: bool


@dataclass(frozen=True, slots=True)
class DimensionSplit:
    """Reshape that splits a dimension, or merges dimensions.

    Attributes:
        merged: Number of the dimension that is split or results from merging.
        parts: Numbers of its parts, major first.
        equation: Index of the equation.
    """

    merged: int
    parts: tuple[int, ...]
    equation: int


@dataclass(eq=False)
class DimensionLinks:
    """All links of a program.

    Attributes:
        program: The program.
        links: Equal dimensions.
        scanned: Leading dimensions over which a scan steps.
        windowed: Dimensions along which the window of a convolution slides.
        part_pairs: Pairs of dimensions of which one is a part of the other (concatenate, slice, pad).
        splits: Reshapes that split or merge dimensions.
    """

    program: Program
    links: list[DimensionLink] = field(default_factory=list)
    scanned: set[int] = field(default_factory=set)
    windowed: set[int] = field(default_factory=set)
    part_pairs: list[tuple[int, int]] = field(default_factory=list)
    splits: list[DimensionSplit] = field(default_factory=list)

    @cached_property
    def indices(self) -> LookupIndices:
        """Origins of the program's look-up indices."""
        return LookupIndices(self.program)

    def link_values(self, a: Value | None, b: Value | None, lead: int = 0) -> None:
        """Link all dimensions of two values pairwise.

        Args:
            a: A value, None for a literal.
            b: A value, None for a literal.
            lead: Number of leading loop dimensions of `a` that `b` lacks, 0 or 1.
        """
        if a is not None and b is not None:
            nodes = zip(self.program.dim_numbers(a)[lead:], self.program.dim_numbers(b), strict=False)
            self.links += [DimensionLink(x, y, None, same_storage=True) for x, y in nodes]

    def link_bodies(self, e: Equation) -> None:
        """Link values that enter bodies, leave bodies, and go round loops."""
        for body in e.bodies:
            for a, b, lead in body.inputs:
                self._link_body_value(a, b, lead)
            for a, b, lead in body.outputs:
                self._link_body_value(b, a, lead)
            for a, b in (*body.carries, *body.zero_trip):
                self.link_values(a, b)

    def _link_body_value(self, outside: Value | None, inside: Value | None, lead: int) -> None:
        """Link an outer with an inner value, and note a scanned dimension."""
        self.link_values(outside, inside, lead)
        if lead and outside is not None:
            self.scanned.add(self.program.dim_number(outside, 0))

    def link_equation(self, e: Equation) -> None:
        """Link dimensions of an equation without bodies, by its sharding rule."""
        rule, first = e.sharding_rule, self.program.first_dim
        first_dims = [None if v is None else first[v] for v in (*e.operands, *e.results)]  # None: a literal

        def dim_numbers(ats: Iterable[SlotDim]) -> list[int]:
            return [begin + d for slot, d in ats if (begin := first_dims[slot]) is not None]

        # Of a primitive that is not in the table, the rule links dimensions of equal size at equal positions.
        for dims, _, stored_alike in rule.shared:
            hub, *others = dim_numbers(dims.items()) or [0]
            self.links += [DimensionLink(hub, n, e.index, stored_alike) for n in others]
        for column, d in enumerate(rule.indexed):
            # `logits[arange(n), labels]`: row i of the result reads row i of the operand.
            own = self.indices.iota_dim(e.operands[1], column)
            if own is not None and e.shapes[0][d] == e.shapes[1][own]:
                a, *b = dim_numbers([(0, d), (1, own)])
                self.links += [DimensionLink(a, n, e.index, same_storage=False) for n in b]
        part_dims = map(dim_numbers, rule.parts)
        self.part_pairs += [(pair[0], pair[1]) for pair in part_dims if len(pair) == 2]
        self.windowed.update(dim_numbers(rule.windows))
        for merged, parts in rule.splits if None not in e.operands else ():
            self.splits += [DimensionSplit(n, tuple(dim_numbers(parts)), e.index) for n in dim_numbers([merged])]


def _find_links(program: Program) -> DimensionLinks:
    """Return the links of all equations of `program`, bodies included.

    Args:
        program: The program.
    """
    links = DimensionLinks(program)
    for e in program.equations:
        (links.link_bodies if e.bodies else links.link_equation)(e)
    return links


class Dimensions:
    """Logical dimensions of a program (batch, hidden, heads, vocabulary).

    A logical dimension is a union-find class over all links, matmuls included.

    Args:
        program: The step.
        axis_sizes: Sizes of the mesh axes.
        copies: Values, inputs and gradients, to be stored as another value is.
        tensor_parallel: Number of devices over which features are divided; 0 where they are not.
        data: Inputs that may hold examples; dimensions derived from their dimensions are no features.

    Attributes:
        max_axis_size: Largest of `axis_sizes`.
        links: Links between dimensions, from the equations and from `copies`.
        unshardable: Numbers of dimensions whose reshape no shard survives: over any mesh axis, or, for a feature, over
            the devices of tensor parallelism.
        largest: Largest size of a dimension, by class.
        all_sizes: All sizes of dimensions, by class.
        scanned: Classes that loops step over.
        windowed: Classes along which convolution windows slide.
    """

    def __init__(
        self,
        program: Program,
        axis_sizes: tuple[int, ...],
        copies: Mapping[Value, Value] | None = None,
        tensor_parallel: int = 0,
        data: Iterable[Value] = (),
    ):
        self.program = program
        self.max_axis_size = max(axis_sizes, default=1)
        self.links: DimensionLinks = _find_links(program)
        for copy, original in (copies or {}).items():
            self.links.link_values(original, copy)
        self.unshardable: set[int] = set()
        self._sets = UnionFind(len(program.sizes))
        for link in self.links.links:
            self._sets.union(link.a, link.b)
        self._split_links = self._link_splits(axis_sizes, tensor_parallel, data)
        self._class = [self._sets.find(n) for n in range(len(program.sizes))]
        self.largest: dict[int, int] = defaultdict(int)
        self.all_sizes: dict[int, set[int]] = defaultdict(set)
        for n, size in enumerate(program.sizes):
            c = self._class[n]
            self.all_sizes[c].add(size)
            if size > self.largest[c]:
                self.largest[c] = size
        self.scanned = {self._class[n] for n in self.links.scanned}
        self.windowed = {self._class[n] for n in self.links.windowed}

    def _link_splits(
        self, axis_sizes: tuple[int, ...], tensor_parallel: int, data: Iterable[Value]
    ) -> list[tuple[int, int, int]]:
        """Link each split dimension with the part that carries its shards, and return these links.

        A dimension whose major part can carry no shards becomes unshardable instead.
        """
        scanned = {self._sets.find(n) for n in self.links.scanned}
        examples = {self._sets.find(n) for v in data for n in self.program.dim_numbers(v)}
        links = []
        for split in self.links.splits:
            # The major part carries the shards; where a loop steps over the major part (microbatches), the next one
            # does.
            part = next((n for n in split.parts if self._sets.find(n) not in scanned), split.parts[0])
            holds_examples = not examples.isdisjoint(map(self._sets.find, (split.merged, *split.parts)))
            # Only tensor parallelism divides features, so only its devices count: heads of keys, for example, are too
            # few for other axes.
            sizes = (tensor_parallel,) if tensor_parallel and not holds_examples else axis_sizes
            # A major part that no axis size divides (the 3 of a split into 3, heads and head size) carries no shards,
            # nor does the merged dimension.
            if part == split.parts[0] and all(self.program.sizes[part] % n for n in sizes):
                self.unshardable.add(split.merged)
            else:
                self._sets.union(split.merged, part)
                links.append((split.merged, part, split.equation))
                # The union may have changed the representative, which later splits look up in `examples`.
                if holds_examples:
                    examples.add(self._sets.find(split.merged))
        return links

    @cached_property
    def _parts(self) -> dict[int, set[int]]:
        """Classes that are parts of a class, or of which the class is a part."""
        parts = defaultdict[int, set[int]](set)
        for a, b in self.links.part_pairs:
            a, b = self._class[a], self._class[b]
            parts[a].add(b)
            parts[b].add(a)
        return parts

    def related_classes(self, c: int, among: Callable[[int], bool]) -> frozenset[int]:
        """Return `c` and the classes made from it by shifting, concatenating, slicing or microbatching.

        Args:
            c: A class.
            among: Filter on the classes to enter.
        """
        return frozenset(transitive_closure([c], lambda a: filter(among, self._parts.get(a, ()))))

    def class_of_dim(self, node: int) -> int:
        """Return the class of a dimension, given by `Program.dim_number`."""
        return self._class[node]

    def classes_of(self, value: Value | None) -> list[int]:
        """Return the class of every dimension of `value`; empty for a literal."""
        return [] if value is None else [self._class[n] for n in self.program.dim_numbers(value)]

    def nontrivial_classes(self, value: Value | None) -> list[int | None]:
        """Return the class of every dimension of `value`, with None for dimensions of size 1."""
        if value is None:
            return []
        shape = self.program.shapes[value]
        # Dimensions of size 1 share classes by coincidence.
        return [c if z > 1 else None for c, z in zip(self.classes_of(value), shape, strict=True)]

    def storage_classes(self, batch: Iterable[int]) -> "StorageClasses":
        """Return the classes of dimensions stored alike.

        Args:
            batch: Classes that are batch dimensions.
        """
        return StorageClasses(self, frozenset(batch), self._split_links)


class StorageClasses:
    """Classes of dimensions stored with one layout.

    The links are those that keep the layout, from equations that touch no batch dimension.

    A parameter shares classes with its gradient, its optimizer moments and its new value. Two weights of one logical
    dimension don't.

    Args:
        dims: Logical dimensions.
        batch: Classes that are batch dimensions.
        splits: Links of split dimensions with the part that carries their shards, and the number of the equation.

    Attributes:
        batch: Classes that are batch dimensions.
        scanned: Storage classes that loops step over.
        windowed: Storage classes along which convolution windows slide.
        unshardable: Storage classes that no shard survives.
        sizes: Sizes of dimensions, by storage class.
    """

    def __init__(self, dims: Dimensions, batch: frozenset[int], splits: list[tuple[int, int, int]]):
        program = dims.program
        self._program = program
        self.batch = batch
        is_batch_dim = [dims.class_of_dim(n) in batch for n in range(len(program.sizes))]
        self._has_batch = [any(is_batch_dim[n] for n in program.dim_numbers(v)) for v in range(len(program.avals))]
        self._touches_batch = [
            any(self._has_batch[v] for v in (*e.operands, *e.results) if v is not None) for e in program.equations
        ]
        value_of = [v for v in range(len(program.avals)) for _ in program.dim_numbers(v)]
        sets = UnionFind(len(program.sizes))
        storage_links = [(x.a, x.b, x.equation) for x in dims.links.links if x.same_storage] + splits
        for a, b, equation in storage_links:
            mixes = equation is not None and self._touches_batch[equation]
            # An equation on activations links weights of one logical dimension that need not be stored alike.
            if not mixes and not self._has_batch[value_of[a]] and not self._has_batch[value_of[b]]:
                sets.union(a, b)
        self._class = [sets.find(n) for n in range(len(program.sizes))]
        self.scanned = {self._class[n] for n in dims.links.scanned}
        self.windowed = {self._class[n] for n in dims.links.windowed}
        self.unshardable = {self._class[n] for n in dims.unshardable}
        self.sizes: dict[int, set[int]] = defaultdict(set)
        for n, size in enumerate(program.sizes):
            self.sizes[self._class[n]].add(size)

    def classes_of(self, value: Value) -> list[int]:
        """Return the storage class of every dimension of `value`."""
        return [self._class[n] for n in self._program.dim_numbers(value)]

    def has_batch(self, value: Value | None) -> bool:
        """Return whether `value` has a batch dimension; False for a literal."""
        return value is not None and self._has_batch[value]

    def touches_batch(self, e: Equation) -> bool:
        """Return whether an operand or result of `e` has a batch dimension."""
        return self._touches_batch[e.index]
