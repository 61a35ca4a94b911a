"""Where a step finds out which is the largest along a dimension: what a router does, and a softmax on the way."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax import lax

from .ir import Equation, Program, Value
from .primitives.primitive import Kind
from .primitives.sharding_rules import along, reduced


@dataclass(frozen=True)
class Ranking:
    """An equation that ranks the `number` places along the dimension `dim` of what it reads, `operand`.

    `chosen`: by index, its result that has places of the `best` that it names; both None where it names none, as a sort
    does and a maximum.
    """

    equation: Equation
    operand: Value
    dim: int
    number: int
    chosen: int | None = None
    best: int | None = None

    @property
    def told(self) -> list[Value]:
        """The results that tell one place from another: none of a maximum."""
        return [] if self.equation.primitive.reduces else self.equation.outs


def rankings(program: Program) -> Iterator[Ranking]:
    """Those of a program, in order: sorts, `top_k`, `argmax` and `argmin`, and the maxima of softmaxes."""
    for e in program.equations:
        row, operand = e.primitive, e.ins[0] if e.ins else None
        ranks = row.kind is Kind.ORDER or row.places is not None or row.joins is lax.max
        if operand is None or not ranks:
            continue
        shape = program.shapes[operand]
        for d in reduced(e.params) if row.kind is Kind.REDUCTION else along(e.params, len(shape)):
            best = None
            if row.places is not None:
                best = 1 if row.kind is Kind.REDUCTION else program.shapes[e.outs[row.places]][d]
            yield Ranking(e, operand, d, shape[d], row.places, best)


def best_of(program: Program, number: int) -> int | None:
    """How many of so many experts a token chooses; None where that can't be told."""
    return max((r.best for r in rankings(program) if r.number == number and r.best is not None), default=None)
