"""What arrays are looked up by: the numbers of their own rows, or whole numbers among the inputs."""

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .ir import Equation, Program, Value
from .primitives import called, is_literal
from .primitives.factors import Factors
from .primitives.primitive import Kind

_SAME_NUMBERS = (Kind.ELEMENTWISE, Kind.SHAPE, Kind.CUT)


@dataclass(frozen=True, eq=False)
class Indices:
    """What the indices of `program` are made of."""

    program: Program

    def counted(self, value: Value | None, column: int | None = None) -> int | None:
        """The dimension of `value` whose row i holds the number i; with `column` at that place of the last dimension
        alone, whatever stands beside it. None where it counts no dimension.

        `logits[jnp.arange(n), labels]` looks up at an index of shape (n, 2) whose column 0 counts dimension 0.
        """
        if value is None:
            return None
        e = self.program.maker.get(value)
        if e is None:
            return self.counted(self.program.outside(value), column)
        if called(e.eqn) is not None:
            return self.counted(next(a for a, b, _ in e.doors[0].out if b == value), column)
        rank = len(self.program.shapes[value])
        if e.name == "iota":
            d = e.params["dimension"]
            return d if column is None or d < rank - 1 else None
        if e.name == "concatenate":
            return self._beside(e, column) if e.params["dimension"] == rank - 1 else None
        if e.name == "select_n":
            return self.counted(e.ins[1], column) if made_positive(self.program, e) else None
        if e.name == "clamp":
            return self.counted(e.ins[1], column)
        if e.factors is not None:
            return self._relaid(e, e.factors, column)
        return self.counted(e.ins[0], column) if e.primitive.alias and e.primitive.elementwise else None

    def inputs(self, value: Value | None) -> Set[Value]:
        """The inputs of the program whose numbers, or some of them, an index has: not those that it was sorted or
        drawn by. None where it counts rows as well, so that it stays within them (`row * length + place`). Each value
        is gone through once, whatever is asked for."""
        known, waiting = self._known, [] if value is None else [value]
        while waiting:
            v = waiting[-1]
            sources = self._made_of(v)
            if unknown := [] if v in known else [a for a in sources if a not in known]:
                waiting += unknown
                continue
            waiting.pop()
            e = self.program.maker.get(v)
            found = [known[a] for a in sources]
            counts = None in found or (e is not None and e.primitive.kind is Kind.SOURCE)
            own = {v} & self._inputs
            known[v] = None if counts else own.union(*(each for each in found if each is not None))
        return (None if value is None else known[value]) or frozenset()

    @cached_property
    def _known(self) -> dict[Value, Set[Value] | None]:
        """The inputs that a value is made of, as far as somebody asked; None where rows are counted as well."""
        return {}

    @cached_property
    def _inputs(self) -> frozenset[Value]:
        return frozenset(self.program.inputs)

    def _made_of(self, value: Value) -> list[Value]:
        e = self.program.maker.get(value)
        if e is None:
            sources: list[Value | None] = [self.program.outside(value)]
        elif called(e.eqn) is not None:
            sources = [a for a, b, _ in e.doors[0].out if b == value]
        else:
            sources = e.ins if e.primitive.kind in _SAME_NUMBERS else []
        return [v for v in sources if v is not None]

    def _beside(self, e: Equation, column: int | None) -> int | None:
        if column is None:
            return None
        at = 0
        for v in e.ins:
            width = 0 if v is None else self.program.shapes[v][-1]
            if at <= column < at + width:
                return self.counted(v, column - at)
            at += width
        return None

    def _relaid(self, e: Equation, factors: Factors, column: int | None) -> int | None:
        """A column stays one where the last dimension does; what is repeated along the last one is the same in all."""
        if column is not None:
            last = len(factors.result) - 1
            if last in factors.repeated:
                column = None
            elif factors.inverse.whole(last) != len(factors.operand) - 1:
                return None
        d = self.counted(e.ins[0], column)
        return None if d is None else factors.whole(d)


def made_positive(program: Program, e: Equation) -> bool:
    """Is this the choice between an index and one that counts from the end, by its sign?"""
    test = None if e.ins[0] is None else program.maker.get(e.ins[0])
    if test is None or test.name != "lt" or test.ins[0] is None or test.ins[0] != e.ins[1]:
        return False
    zero = test.eqn.invars[1]
    return is_literal(zero) and bool(np.all(zero.val == 0))
