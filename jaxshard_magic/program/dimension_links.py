"""Links between dimensions of a program that are the same dimension, from the sharding rules of all equations."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from .ir import Equation, Program, Value
from .lookup_indices import LookupIndices
from .primitives.sharding_rules import SlotDim


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


def find_links(program: Program) -> DimensionLinks:
    """Return the links of all equations of `program`, bodies included.

    Args:
        program: The program.
    """
    links = DimensionLinks(program)
    for e in program.equations:
        (links.link_bodies if e.bodies else links.link_equation)(e)
    return links
