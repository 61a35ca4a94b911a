"""Which dimensions of a program are the same dimension: those of every equation, as the table of primitives says."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from .indices import Indices
from .ir import Equation, Program, Value


@dataclass(frozen=True, slots=True)
class Link:
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

    def link(
        self, e: Equation | None, a: Value | None, da: int, b: Value | None, db: int, alike: bool = True
    ) -> None:
        if a is not None and b is not None:
            p = self.program
            self.links.append(Link(p.first[a] + da, p.first[b] + db, e.index if e else None, alike))

    def split(self, e: Equation, whole: int, parts: Iterable[int]) -> None:
        self.splits.append(Split(whole, tuple(parts), e.index))

    @cached_property
    def indices(self) -> Indices:
        return Indices(self.program)

    def shape(self, value: Value | None) -> tuple[int, ...]:
        return () if value is None else self.program.shapes[value]

    def same(self, a: Value | None, b: Value | None, lead: int = 0) -> None:
        """All dimensions one to one through a door; `lead` = 1: a loop dimension of `a` is not in `b`."""
        for d in range(len(self.shape(b))):
            self.link(None, a, d + lead, b, d)


def find_links(program: Program) -> Links:
    """The links of every equation of `program`, bodies included."""
    links = Links(program)
    for e in program.equations:
        if e.doors:
            _through_doors(links, e)
        else:
            e.primitive.dims(links, e)
    return links


def _through_doors(links: Links, e: Equation) -> None:
    for door in e.doors:
        for a, b, lead in door.into:
            links.same(a, b, lead)
            if lead and a is not None:
                links.looped.add(links.program.node(a, 0))
        for a, b, lead in door.out:
            links.same(b, a, lead)
            if lead and b is not None:
                links.looped.add(links.program.node(b, 0))
        for a, b in (*door.loop, *door.skip):
            links.same(a, b)
