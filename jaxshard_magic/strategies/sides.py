"""Where a step works expert by expert, and where token by token, so that as little as can be is sent in between.

Tokens lie over all batch axes; where they are with their experts, these lie over the expert axes instead. Products with
a weight for each expert work so, and what chooses among the experts needs them all: between these, the cheapest cut
through the equations says where to change. With one-hot dispatch that is right after the tokens were dispatched and
before they are combined, an all-to-all each; where all experts see all tokens, a gather of the tokens before, and a sum
over the experts after.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from ..program.ir import Equation, Value
from ..program.primitives.factors import broadcast
from ..program.primitives.primitive import Kind
from ..program.primitives.sharding_rules import reduced
from ..program.unionfind import UnionFind
from .changes import bytes_sent
from .cut import Network, Node
from .layout import Axes, Experts, Layout, Spec, without


def take_sides(layout: Layout, experts: Experts) -> Experts:
    """`experts` with what works by expert; of `stored` those storage classes that are said to be divided, and others
    that follow them (biases)."""
    layout.experts = experts
    ways, found = _Ways(layout, experts), experts
    for c in sorted(experts.classes):
        one = _Sides(layout, experts, c, ways).taken()
        found = replace(
            found,
            stored=found.stored | one.stored,
            equations=found.equations | one.equations,
            made=found.made | one.made,
        )
    return found


class _Ways:
    """By the classes that count experts: the `values` that have one, or places for the tokens of all examples, the
    `equations` that touch these and activations, and the pairs of them at the `doors` of bodies; by equation the
    dimensions that are `linked` in it."""

    def __init__(self, layout: Layout, experts: Experts):
        program = layout.program
        self.values, self.equations = (
            defaultdict[int, list[Value]](list),
            defaultdict[int, list[Equation]](list),
        )
        self.doors = defaultdict[int, list[tuple[Value, Value]]](list)
        self.linked = defaultdict[int, set[int]](set)
        classes = [self._of(layout, experts, v) for v in range(len(program.avals))]
        for v, own in enumerate(classes):
            for c in own:
                self.values[c].append(v)
        self.has = {c: frozenset(values) for c, values in self.values.items()}
        for e in program.equations:
            ends = [v for v in (*e.ins, *e.outs) if v is not None]
            for a, b in _at_doors(e):
                for c in classes[a] & classes[b]:
                    self.doors[c].append((a, b))
            if e.doors or layout.flow.used.isdisjoint(e.outs) or not any(map(layout.batchy, ends)):
                continue
            for c in frozenset[int]().union(*(classes[v] for v in ends)):
                self.equations[c].append(e)
        for link in layout.dims.links.links:
            if link.equation is not None:
                self.linked[link.equation] |= {link.a, link.b}

    @staticmethod
    def _of(layout: Layout, experts: Experts, v: Value) -> frozenset[int]:
        big = layout.dims.big(v)
        return experts.classes.intersection(big) or (
            frozenset() if experts.shared.isdisjoint(big) else experts.classes
        )


def _at_doors(e: Equation) -> Iterable[tuple[Value, Value]]:
    for door in e.doors:
        pairs = [(a, b) for a, b, _ in (*door.into, *door.out)]
        for a, b in (*pairs, *door.loop, *door.skip):
            if a is not None and b is not None:
                yield a, b


class _Sides:
    """The experts that one dimension class counts. A node of the network is what must be on one side: an equation with
    what it makes, the values at both sides of a body's door, the storage class of parameters."""

    def __init__(self, layout: Layout, experts: Experts, c: int, ways: _Ways):
        self._layout, self._program, self._experts, self._c = layout, layout.program, experts, c
        self._ways = ways
        self._groups = UnionFind(len(self._program.avals) + len(self._program.equations))
        self._network = Network()

    def taken(self) -> Experts:
        equations = self._ways.equations[self._c]
        for e in equations:
            for v in filter(self._counted, e.outs):
                self._groups.union(v, self._number(e))
        for a, b in self._ways.doors[self._c]:
            if self._counted(a) and self._counted(b):
                self._groups.union(a, b)
        self._ends(equations)
        self._weights(equations)
        self._between(equations)
        self._of_loops()
        ones = self._network.cut()
        return replace(
            self._experts,
            stored=frozenset(n[1] for n in ones if isinstance(n, tuple) and n[0] == "stored"),
            equations=frozenset(e.index for e in equations if self._node(e) in ones),
            made=frozenset(v for v in self._ways.values[self._c] if self._is_made(v, ones)),
        )

    def _is_made(self, v: Value, ones: set[Node]) -> bool:
        return self._counted(v) and self._groups.find(v) in ones

    def _has(self, v: Value | None) -> bool:
        return v in self._ways.has[self._c]

    def _counted(self, v: Value | None) -> bool:
        """Is it an activation with a part for each expert, or for each place that all have?"""
        return self._layout.batchy(v) and self._has(v)

    def _number(self, e: Equation) -> int:
        return len(self._program.avals) + e.index

    def _node(self, e: Equation) -> Node:
        return self._groups.find(self._number(e))

    def _of_weight(self, v: Value) -> int | None:
        """The storage class that counts the experts of a parameter or its gradient; None for an activation."""
        if self._layout.batchy(v) or self._c not in self._layout.dims.big(v):
            return None
        return self._layout.storage.of(v)[self._layout.dims.big(v).index(self._c)]

    def _ends(self, equations: list[Equation]) -> None:
        """What is on one side in any case, and what sums cost on either."""
        net = self._network
        for e in equations:
            stored = {self._of_weight(v) for v in (*e.ins, *e.outs) if v is not None}
            if e.primitive.product and stored & self._experts.stored:
                net.cost(net.ONE, self._node(e), math.inf)
            elif self._dispatches(e) or not self._can(e):
                net.cost(self._node(e), net.OTHER, math.inf)
            else:
                net.cost(self._node(e), net.OTHER, self._summing(e, by_expert=True))
                net.cost(net.ONE, self._node(e), self._summing(e, by_expert=False))

    def _dispatches(self, e: Equation) -> bool:
        """Does `e` bring tokens to places of experts, or back?"""
        ends = (v for v in (*e.ins, *e.outs) if v is not None)
        return e.primitive.product and any(self._experts.places & set(self._layout.dims.of(v)) for v in ends)

    def _can(self, e: Equation) -> bool:
        """Can `e` work on each device's own experts? Where it needs no other's, or adds up what it makes of them."""
        if e.primitive.scatters:
            return False
        if e.primitive.kind in (Kind.SOURCE, Kind.RANDOM) or e.primitive.factors is broadcast:
            return True
        program, summed = self._program, set[int]()
        if e.primitive.reduces and e.primitive.linear is not None and e.ins[0] is not None:
            summed = {program.node(e.ins[0], d) for d in reduced(e.params)}
        ends = [v for v in (*e.ins, *e.outs) if self._has(v)]
        nodes = {
            program.node(v, d)
            for v in ends
            if v is not None
            for d, c in enumerate(self._layout.dims.big(v))
            if c == self._c
        }
        return nodes <= self._ways.linked[e.index] | summed

    def _summing(self, e: Equation, *, by_expert: bool) -> int:
        """Bytes that a device sends to add up what `e` makes."""
        out = e.outs[0]
        if not self._layout.batchy(out):
            return 0
        over = self._summed_over(e, by_expert)
        spec = self._layout.lying(out, by_expert and self._has(out))
        n, size = self._layout.count(over), self._layout.bytes_of(out, without(spec, over))
        scattered = any(a in axes for axes in spec for a in over)
        return e.trips * size * (n - 1) // n * (1 if scattered else 2)

    def _summed_over(self, e: Equation, by_expert: bool) -> Axes:
        def lying(v: Value) -> Spec:
            return (
                self._layout.lying(v, by_expert) if self._layout.batchy(v) else self._at_weight(v, by_expert)
            )

        (first, second), found = (*e.ins, None, None)[:2], list[str]()
        if (c := e.contraction) is not None and first is not None and second is not None:
            left, right = lying(first), lying(second)
            found = [a for i, j in c.contracted for a in left[i] if a in right[j]]
        elif e.primitive.reduces and first is not None:
            found = [a for d in reduced(e.params) for a in lying(first)[d]]
        return tuple(dict.fromkeys(found))

    def _at_weight(self, v: Value, by_expert: bool) -> Spec:
        axes = self._experts.axes if by_expert else ()
        return [axes if c == self._c else () for c in self._layout.dims.big(v)]

    def _weights(self, equations: list[Equation]) -> None:
        """Parameters lie as what works with them."""
        net = self._network
        for e in equations:
            for v in {*e.ins, *e.outs} - {None}:
                if v is None or (sc := self._of_weight(v)) is None:
                    continue
                size = e.trips * self._layout.bytes_of(v, [])
                net.cost(self._node(e), ("stored", sc), size)
                net.cost(("stored", sc), self._node(e), size)
                if sc in self._experts.stored:
                    net.cost(net.ONE, ("stored", sc), math.inf)

    def _between(self, equations: list[Equation]) -> None:
        """What activations cost that are made on one side and read on the other: once, however many read them."""
        net, readers = self._network, defaultdict[Value, list[Equation]](list)
        for e in equations:
            for v in {v for v in e.ins if v is not None and self._layout.batchy(v)}:
                readers[v].append(e)
        for loop in self._experts.loops.values():
            readers |= {v: readers[v] for v in loop.stacks if self._counted(v)}
        for v, read_by in readers.items():
            trips = max((e.trips for e in read_by), default=1)
            tokens, experts = self._layout.lying(v, False), self._layout.lying(v, True)
            made = self._groups.find(v) if self._has(v) else net.OTHER
            net.cost(("to", v), made, trips * bytes_sent(self._layout, v, tokens, experts))
            net.cost(made, ("from", v), trips * bytes_sent(self._layout, v, experts, tokens) * self._has(v))
            for e in read_by:
                net.cost(self._node(e), ("to", v), math.inf)
                net.cost(("from", v), self._node(e), math.inf)

    def _of_loops(self) -> None:
        """What loops over experts stack lies by expert, and so they read what they step over."""
        net = self._network
        for loop in self._experts.loops.values():
            for v in filter(self._counted, loop.stacks):
                if v in loop.equation.outs:
                    net.cost(net.ONE, self._groups.find(v), math.inf)
                else:
                    net.cost(net.ONE, ("to", v), math.inf)
