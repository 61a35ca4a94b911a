"""Which dimensions of a program are the same dimension: those of every equation, as the table of primitives says."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .indices import Indices
from .ir import Equation, Program, Value
from .primitives.sharding_rules import At


class Link(NamedTuple):
    """`equation` says that the dimensions `a` and `b` are one, None: the door of a body. `alike`: their values lie in
    memory alike, too."""

    a: int
    b: int
    equation: int | None
    alike: bool


@dataclass(frozen=True, slots=True)
class Split:
    """A reshape that cut the dimension `whole` into `parts`, major first, or merged them into it."""

    whole: int
    parts: tuple[int, ...]
    equation: int


@dataclass(eq=False)
class Links:
    """All links of a program.

    `looped`: leading dimensions that a scan steps over. `windowed`: those that a convolution's window lies along.
    `splits`: reshapes that cut or merge. `cut`: pairs where one is a part of the other (concatenate, slice, pad).
    """

    program: Program
    links: list[Link] = field(default_factory=list)
    looped: set[int] = field(default_factory=set)
    windowed: set[int] = field(default_factory=set)
    cut: list[tuple[int, int]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)

    @cached_property
    def indices(self) -> Indices:
        return Indices(self.program)

    def same(self, a: Value | None, b: Value | None, lead: int = 0) -> None:
        """Link all dimensions one to one through a door; `lead` = 1: a loop dimension of `a` is not in `b`."""
        if a is not None and b is not None:
            nodes = zip(self.program.nodes(a)[lead:], self.program.nodes(b), strict=False)
            self.links += [Link(x, y, None, alike=True) for x, y in nodes]

    def bodies(self, e: Equation) -> None:
        """Link what enters bodies, leaves them and goes round their loops."""
        for door in e.doors:
            for a, b, lead in door.into:
                self._through(a, b, lead)
            for a, b, lead in door.out:
                self._through(b, a, lead)
            for a, b in (*door.loop, *door.skip):
                self.same(a, b)

    def _through(self, outside: Value | None, inside: Value | None, lead: int) -> None:
        self.same(outside, inside, lead)
        if lead and outside is not None:
            self.looped.add(self.program.node(outside, 0))

    def equation(self, e: Equation) -> None:
        """Link what the sharding rule of an equation without bodies says."""
        rule, first = e.sharding_rule, self.program.first
        begins = [None if v is None else first[v] for v in (*e.ins, *e.outs)]  # a literal has no dimension

        def nodes(ats: Iterable[At]) -> list[int]:
            return [begin + d for slot, d in ats if (begin := begins[slot]) is not None]

        for dims, _, stored_alike in rule.shared:
            hub, *others = nodes(dims.items()) or [0]
            self.links += [Link(hub, n, e.index, stored_alike) for n in others]
        for column, d in enumerate(rule.indexed):
            own = self.indices.counted(e.ins[1], column)  # each row is looked up by its own number
            if own is not None and e.shapes[0][d] == e.shapes[1][own]:
                a, *b = nodes([(0, d), (1, own)])
                self.links += [Link(a, n, e.index, alike=False) for n in b]
        ends = map(nodes, rule.parts)
        self.cut += [(pair[0], pair[1]) for pair in ends if len(pair) == 2]
        self.windowed.update(nodes(rule.windows))
        for whole, parts in rule.splits if None not in e.ins else ():
            self.splits += [Split(n, tuple(nodes(parts)), e.index) for n in nodes([whole])]


def find_links(program: Program) -> Links:
    """The links of every equation of `program`, bodies included."""
    links = Links(program)
    for e in program.equations:
        (links.bodies if e.doors else links.equation)(e)
    return links
