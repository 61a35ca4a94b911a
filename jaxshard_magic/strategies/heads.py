"""Attention with whole positions and divided heads: what lies so, and where it changes from divided positions and back.

Around each attention queries, keys and values go from divided positions to divided heads by an all-to-all each, and its
result back by one (Jacobs et al. 2023, "DeepSpeed Ulysses"); their gradients the other way. In between a device has all
positions of its heads, so that any mask and any form of attention works. What belongs to an attention is read off the
step: equations on values that have positions twice (scores), and what only these read or are made for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..program.ir import Equation, Value
from ..program.primitives.primitive import Kind
from ..program.unionfind import UnionFind
from .layout import Axes, Exchanges, Layout, Spec

_PLAIN = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.REDUCTION)


@dataclass(frozen=True)
class Attended:
    """What belongs together between two changes of division: an attention with its backward pass.

    `equations`: by index. `scores`: the product that makes them first. `heads`: the classes of the dimension that is
    divided while positions are whole; empty where none divides. `sizes`: of what would have to divide, `over`: over
    which mesh axes.
    """

    equations: frozenset[int]
    scores: Equation
    heads: frozenset[int]
    sizes: tuple[int, ...]
    over: Axes


@dataclass(frozen=True)
class _Heads:
    """Of one product: the class that is divided, None where no size divides, and what was looked at."""

    divided: int | None
    sizes: tuple[int, ...]
    over: Axes


class Attentions:
    """The attentions of a step whose positions are divided: equations on values with positions twice, and their
    surroundings up to where fewest bytes cross."""

    def __init__(self, layout: Layout):
        self._layout, self._program = layout, layout.program
        self._used = layout.flow.used
        self._doors = UnionFind(len(layout.program.avals))
        for e in self._program.equations:
            for door in e.doors:
                pairs = [(a, b) for a, b, _ in (*door.into, *door.out)] + door.loop + door.skip
                for a, b in pairs:
                    if a is not None and b is not None:
                        self._doors.union(a, b)
        self._inner: set[int] = set()
        self._results: set[Value] = (
            set()
        )  # of products that leave the scores, and what is made of them inside
        for e in self._program.equations:
            if not e.doors and any(map(self._paired, (*e.ins, *e.outs))):
                self._add(e)
        self._between()
        for e in [e for e in self._program.equations if e.index in self._inner and e.primitive.product]:
            for v in e.ins:
                self._inner.update(x.index for x in self._before(v))
            for v in e.outs:
                self._inner.update(x.index for x in self._after(v))

    @cached_property
    def found(self) -> tuple[Attended, ...]:
        """Each of them, in the order of the program."""
        return tuple(self._found())

    def by_heads(self) -> Exchanges:
        """How values lie in the attentions, all of which have heads that divide, and where they change."""
        return self._exchanges({i: a.heads for a in self.found for i in a.equations})

    def _found(self) -> Iterator[Attended]:
        """Those of one layer are one: they share values that are made in it."""
        sets, inner = UnionFind(len(self._program.equations)), self._in_order()
        first: dict[int, int] = {}
        joining = {self._doors.find(v) for e in inner for v in e.outs if self._layout.batchy(v)}
        joining |= {self._doors.find(v) for e in inner if e.primitive.product for v in e.ins if v is not None}
        for e in inner:
            for group in {self._doors.find(v) for v in (*e.ins, *e.outs) if v is not None} & joining:
                if self._is_inside(group):
                    sets.union(first.setdefault(group, e.index), e.index)
        together = defaultdict[int, list[Equation]](list)
        for e in inner:
            together[sets.find(e.index)].append(e)
        for equations in together.values():
            scores = [e for e in equations if e.primitive.product and self._paired(e.outs[0])]
            if not scores:
                continue
            found = [self._heads(e) for e in scores]
            odd = next((each for each in found if each.divided is None), None)
            heads = (
                frozenset() if odd else frozenset(each.divided for each in found if each.divided is not None)
            )
            told = odd or found[0]
            yield Attended(frozenset(e.index for e in equations), scores[0], heads, told.sizes, told.over)

    def _exchanges(self, heads: Mapping[int, frozenset[int]]) -> Exchanges:
        """`heads`: the classes of the dimensions that are divided in an equation, by its index; others are outside."""
        lies: dict[Value, Spec] = {**self._layout.exchanges.lies}
        for e in self._in_order():
            for v in (*e.ins, *e.outs):
                if v is not None and e.index in heads and self._layout.batchy(v):
                    group = self._doors.find(v)
                    if self._is_inside(group):
                        lies |= {w: self._by_heads(w, heads[e.index]) for w in self._members[group]}
        reads, makes = {**self._layout.exchanges.reads}, {**self._layout.exchanges.makes}
        for e in self._program.equations:
            if e.doors or any(v in self._layout.exchanges.makes for v in e.outs):
                continue
            classes = heads.get(e.index)
            for v in (*e.ins, *e.outs):
                if v is None or not self._layout.batchy(v):
                    continue
                here = self._layout.active(v) if classes is None else self._by_heads(v, classes)
                if here == lies.get(v, self._layout.active(v)):
                    continue
                if v not in e.outs:
                    reads[e.index, v] = here
                elif not self._sums_heads(e, classes):
                    makes[v] = here
        return Exchanges(lies, reads, makes)

    def _in_order(self) -> list[Equation]:
        return [e for e in self._program.equations if e.index in self._inner]

    @cached_property
    def _members(self) -> dict[int, list[Value]]:
        """Values that are one through doors, by their number there."""
        found = defaultdict[int, list[Value]](list)
        for v in range(len(self._program.avals)):
            found[self._doors.find(v)].append(v)
        return found

    @cached_property
    def _readers(self) -> dict[int, list[Equation]]:
        return self._by_value(lambda e: e.ins)

    @cached_property
    def _makers(self) -> dict[int, list[Equation]]:
        return self._by_value(lambda e: e.outs)

    def _by_value(self, of: Callable[[Equation], Iterable[Value | None]]) -> dict[int, list[Equation]]:
        found = defaultdict[int, list[Equation]](list)
        for e in self._program.equations:
            if not e.doors and not self._used.isdisjoint(e.outs):
                for v in {v for v in of(e) if v is not None}:
                    found[self._doors.find(v)].append(e)
        return found

    @cached_property
    def _fixed(self) -> set[int]:
        ends = (*self._program.inputs, *self._program.outputs)
        return {self._doors.find(v) for v in ends if v is not None}

    def _is_inside(self, group: int) -> bool:
        """Whether a value lies by heads: all that reads it does, or all that makes it and some of what reads it."""
        readers = [e.index in self._inner for e in self._readers[group]]
        if group in self._fixed or not readers:
            return False
        return all(readers) or (any(readers) and all(e.index in self._inner for e in self._makers[group]))

    def _places(self, v: Value | None) -> list[int]:
        """The dimensions of a value that are positions."""
        if v is None or not self._layout.batchy(v):
            return []
        shape, classes = self._program.shapes[v], self._layout.dims.of(v)
        return [d for d, c in enumerate(classes) if shape[d] > 1 and c in self._layout.sequence]

    def _paired(self, v: Value | None) -> bool:
        return len(self._places(v)) > 1

    def _add(self, e: Equation) -> None:
        self._inner.add(e.index)
        if e.primitive.product or any(v in self._results for v in e.ins):
            self._results.update(v for v in e.outs if not self._paired(v))

    def _between(self) -> None:
        """Add what is made of nothing but values from inside: the maximum and the sum of a softmax, the division by a
        sum of what was mixed."""
        grown = True
        while grown:
            grown = False
            made = {self._doors.find(v) for e in self._in_order() for v in e.outs} - self._fixed
            made = {g for g in made if all(e.index in self._inner for e in self._makers[g])}
            results = {self._doors.find(v) for v in self._results}
            for e in self._program.equations:
                if e.index in self._inner or e.doors or e.primitive.kind not in _PLAIN:
                    continue
                read = {self._doors.find(v) for v in e.ins if v is not None and self._layout.batchy(v)}
                if read and read <= made and not read <= results:
                    self._add(e)
                    grown = True

    def _before(self, v: Value | None) -> list[Equation]:
        """Of the equations that one after the other make `v`, an operand, the most before which the fewest bytes cross:
        casts, other layouts, keys and values repeated for groups of queries."""
        passed: list[Equation] = []
        best, least = 0, self._bytes(v)
        while v is not None and self._places(v) and self._all_read(v, passed):
            e = self._program.maker.get(v)
            only = None if e is None or e.index in self._inner else self._only(e)
            if e is None or only is None or len(self._members[self._doors.find(v)]) > 1:
                break
            passed.append(e)
            v = only
            if self._divides(v) and self._bytes(v) <= least and self._all_read(v, passed):
                best, least = len(passed), self._bytes(v)
        return passed[:best]

    def _after(self, v: Value) -> list[Equation]:
        """Of the equations that one after the other are made of `v`, a result, the most after which the fewest bytes
        cross."""
        passed: list[Equation] = []
        best, least = 0, self._bytes(v)
        while self._places(v) and not self._paired(v):
            readers, group = self._readers[self._doors.find(v)], self._members[self._doors.find(v)]
            if len(readers) != 1 or len(group) > 1 or self._only(readers[0]) != v:
                break
            passed.append(readers[0])
            v = readers[0].outs[0]
            if self._divides(v) and self._bytes(v) <= least:
                best, least = len(passed), self._bytes(v)
        return passed[:best]

    def _all_read(self, v: Value, passed: list[Equation]) -> bool:
        """Whether nothing reads a value but equations inside, or those."""
        return all(e.index in self._inner or e in passed for e in self._readers[self._doors.find(v)])

    def _only(self, e: Equation) -> Value | None:
        """The one activation that a plain equation is made of, beside numbers."""
        if e.doors or e.primitive.kind not in _PLAIN or len(e.outs) != 1:
            return None
        arrays = [v for v in e.ins if v is not None and self._program.shapes[v]]
        return arrays[0] if len(arrays) == 1 and self._layout.batchy(arrays[0]) else None

    def _bytes(self, v: Value | None) -> int:
        return 0 if v is None else self._layout.bytes_of(v, self._layout.active(v))

    def _divides(self, v: Value) -> bool:
        """Whether a value of an attention has heads that divide, by the classes of all."""
        over = self._axes(v)
        by_heads = self._by_heads(v, self._all_heads)
        return bool(over) and any(set(over) <= set(axes) for axes in by_heads)

    @cached_property
    def _all_heads(self) -> frozenset[int]:
        scores = [e for e in self._in_order() if e.primitive.product and self._paired(e.outs[0])]
        return frozenset(each.divided for each in map(self._heads, scores) if each.divided is not None)

    def _axes(self, v: Value) -> Axes:
        """The mesh axes that positions leave to heads."""
        tensor = {a for axes in self._layout.tensor_axes(v) for a in axes}
        return tuple(a for a in self._layout.sequence_axes if a not in tensor)

    def _heads(self, e: Equation) -> _Heads:
        """The heads of a product of queries and keys, the most that divide. Of grouped queries the groups, where the
        heads of keys do not divide."""
        out, c = e.outs[0], e.contraction
        assert c is not None
        shape, classes, examples = (
            self._program.shapes[out],
            self._layout.dims.of(out),
            self._layout.batch.classes,
        )
        places, tensor, own = set(self._places(out)), self._layout.tensor_axes(out), self._axes(out)
        sizes, over = [], own
        for side in [o for *_, o in c.batch], [o for _, o in (*c.left, *c.right)]:
            heads = [d for d in side if shape[d] > 1 and d not in places and classes[d] not in examples]
            for d in sorted(heads, key=lambda d: -shape[d]):
                if shape[d] % self._layout.count((*tensor[d], *own)) == 0:
                    return _Heads(classes[d], (shape[d],), (*tensor[d], *own))
                sizes, over = [*sizes, shape[d]], (*tensor[d], *over)
        return _Heads(None, tuple(sizes), tuple(dict.fromkeys(over)))

    def _by_heads(self, v: Value, heads: frozenset[int]) -> Spec:
        """A value in attention: positions whole, heads over what divides positions elsewhere."""
        shape, classes = self._program.shapes[v], self._layout.dims.of(v)
        spec, over = self._layout.active(v), self._axes(v)
        for d, c in enumerate(classes):
            if c in self._layout.sequence:
                spec[d] = ()
            elif c in heads and over and shape[d] % self._layout.count((*spec[d], *over)) == 0:
                spec[d], over = (*spec[d], *over), ()
        return spec

    def _sums_heads(self, e: Equation, heads: frozenset[int] | None) -> bool:
        """Whether a product sums over the heads: its result is there on no device until it is added up."""
        if heads is None or e.contraction is None or e.ins[0] is None:
            return False
        classes = self._layout.dims.of(e.ins[0])
        return any(classes[d] in heads for d, _ in e.contraction.contracted)
