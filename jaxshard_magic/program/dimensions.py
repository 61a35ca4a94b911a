"""Classes of dimensions: what is one logical dimension, and what is stored alike."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

from .flow import closure
from .ir import Equation, Program, Value
from .links import Links, find_links
from .unionfind import UnionFind


class Dimensions:
    """The logical dimensions of a program (batch, hidden, heads, vocabulary), as union-find classes over all
    links, matmuls included.

    Args:
        program: the step.
        axis_sizes: of the mesh.
        copies: values, inputs and gradients, that are to lie as another one does.
        tensor_parallel: over how many devices features are divided, 0 where they are not.
        data: the inputs that may hold examples; what their dimensions become are no features.

    `looped`, `windowed`: classes that loops step over, and that windows of convolutions lie along. `unshardable`:
    dimensions whose reshape no shard survives, over any of the axes, or of a feature over the devices of tensor
    parallelism. `most_devices`: the largest of `axis_sizes`.
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
        self.most_devices = max(axis_sizes, default=1)
        self.links: Links = find_links(program)
        for copy, original in (copies or {}).items():
            self.links.same(original, copy)
        self.unshardable: set[int] = set()  # numbers of dimensions
        self._sets = UnionFind(len(program.sizes))
        for link in self.links.links:
            self._sets.union(link.a, link.b)
        self._split_links = self._follow_splits(axis_sizes, tensor_parallel, data)
        self._class = [self._sets.find(n) for n in range(len(program.sizes))]
        self.largest: dict[int, int] = defaultdict(int)
        self.all_sizes: dict[int, set[int]] = defaultdict(set)
        for n, size in enumerate(program.sizes):
            c = self._class[n]
            self.all_sizes[c].add(size)
            if size > self.largest[c]:
                self.largest[c] = size
        self.looped = {self._class[n] for n in self.links.looped}
        self.windowed = {self._class[n] for n in self.links.windowed}

    def _follow_splits(
        self, axis_sizes: tuple[int, ...], tensor_parallel: int, data: Iterable[Value]
    ) -> list[tuple[int, int, int]]:
        """A dimension cut into parts goes on as its major part, which carries the shards; where a loop steps over
        that one (microbatches), as the next. A major part that no mesh axis divides (the 3 of 3, heads, head size)
        can carry none, and the whole with it: features (heads of keys, of which there are few) are divided by the
        devices of tensor parallelism alone."""
        looped = {self._sets.find(n) for n in self.links.looped}
        examples = {self._sets.find(n) for v in data for n in self.program.nodes(v)}
        links = []
        for split in self.links.splits:
            part = next((n for n in split.parts if self._sets.find(n) not in looped), split.parts[0])
            holds_examples = not examples.isdisjoint(map(self._sets.find, (split.whole, *split.parts)))
            sizes = (tensor_parallel,) if tensor_parallel and not holds_examples else axis_sizes
            if part == split.parts[0] and all(self.program.sizes[part] % n for n in sizes):
                self.unshardable.add(split.whole)
            else:
                self._sets.union(split.whole, part)
                links.append((split.whole, part, split.equation))
                if holds_examples:  # also for the splits that follow
                    examples.add(self._sets.find(split.whole))
        return links

    @cached_property
    def _parts(self) -> dict[int, set[int]]:
        """The classes that are parts of a class, or of which it is a part."""
        parts = defaultdict[int, set[int]](set)
        for a, b in self.links.cut:
            a, b = self._class[a], self._class[b]
            parts[a].add(b)
            parts[b].add(a)
        return parts

    def reach(self, c: int, among: Callable[[int], bool]) -> frozenset[int]:
        """`c` and what shifting, concatenating, slicing or microbatching makes of it, `among` certain classes."""
        return frozenset(closure([c], lambda a: filter(among, self._parts.get(a, ()))))

    def of_node(self, node: int) -> int:
        return self._class[node]

    def of(self, value: Value | None) -> list[int]:
        """The class of every dimension of `value`."""
        return [] if value is None else [self._class[n] for n in self.program.nodes(value)]

    def big(self, value: Value | None) -> list[int | None]:
        """As `of`, with None for dimensions of size 1: they share classes by accident."""
        if value is None:
            return []
        shape = self.program.shapes[value]
        return [c if z > 1 else None for c, z in zip(self.of(value), shape, strict=True)]

    def storage(self, batch: Iterable[int]) -> "Storage":
        return Storage(self, frozenset(batch), self._split_links)


class Storage:
    """What lies in memory alike: links that keep the layout, of equations that touch no batch.

    Joins a parameter with its gradient, its moments and its new value, not two weights of one logical dimension.
    """

    def __init__(self, dims: Dimensions, batch: frozenset[int], splits: list[tuple[int, int, int]]):
        program = dims.program
        self._program = program
        self.batch = batch
        owner = [dims.of_node(n) in batch for n in range(len(program.sizes))]
        self._batchy = [any(owner[n] for n in program.nodes(v)) for v in range(len(program.avals))]
        self._eqn_batchy = [
            any(self._batchy[v] for v in (*e.ins, *e.outs) if v is not None) for e in program.equations
        ]
        value_of = [v for v in range(len(program.avals)) for _ in program.nodes(v)]
        sets = UnionFind(len(program.sizes))
        alike = [(x.a, x.b, x.equation) for x in dims.links.links if x.alike] + splits
        for a, b, equation in alike:
            mixes = equation is not None and self._eqn_batchy[equation]
            if not mixes and not self._batchy[value_of[a]] and not self._batchy[value_of[b]]:
                sets.union(a, b)
        self._class = [sets.find(n) for n in range(len(program.sizes))]
        self.looped = {self._class[n] for n in dims.links.looped}
        self.windowed = {self._class[n] for n in dims.links.windowed}
        self.unshardable = {self._class[n] for n in dims.unshardable}
        self.sizes: dict[int, set[int]] = defaultdict(set)
        for n, size in enumerate(program.sizes):
            self.sizes[self._class[n]].add(size)

    def of(self, value: Value) -> list[int]:
        return [self._class[n] for n in self._program.nodes(value)]

    def batchy(self, value: Value | None) -> bool:
        """Whether `value` has a batch dimension."""
        return value is not None and self._batchy[value]

    def batchy_equation(self, e: Equation) -> bool:
        return self._eqn_batchy[e.index]
