"""Find equations that rank along a dimension: `top_k` and its kin, as in routers, and the maxima of softmaxes."""

from collections.abc import Iterator
from dataclasses import dataclass

from jax import lax

from .ir import Equation, Program, Value
from .primitives.primitive import Kind
from .primitives.sharding_rules import axis_dims, reduced_dims


@dataclass(frozen=True)
class TopKSite:
    """Equation that ranks the entries along a dimension of an operand.

    Attributes:
        equation: The equation.
        operand: Value ranked.
        dim: Dimension ranked along.
        size: Number of entries along `dim`.
        indices_result: Number of the result that holds indices of the best entries. None for a sort or a maximum, which
            name none.
        k: Number of best entries named; None with `indices_result`.
    """

    equation: Equation
    operand: Value
    dim: int
    size: int
    indices_result: int | None = None
    k: int | None = None

    @property
    def ranking_results(self) -> list[Value]:
        """Results that distinguish entries from each other; empty for a maximum."""
        return [] if self.equation.primitive.is_combinable else self.equation.results


def find_topk_sites(program: Program) -> Iterator[TopKSite]:
    """Yield the rankings of a program in order: sorts, `top_k`, `argmax`, `argmin`, and the maxima of softmaxes."""
    for e in program.equations:
        row, operand = e.primitive, e.operands[0] if e.operands else None
        # A softmax is recognised by the maximum that it subtracts.
        ranks = row.kind is Kind.SORT or row.index_result is not None or row.combiner is lax.max
        if operand is None or not ranks:
            continue
        shape = program.shapes[operand]
        for d in reduced_dims(e.params) if row.kind is Kind.REDUCTION else axis_dims(e.params, len(shape)):
            best = None
            if row.index_result is not None:
                # An `argmax` is a reduction and names one entry; `top_k` has a dimension of k entries.
                best = 1 if row.kind is Kind.REDUCTION else program.shapes[e.results[row.index_result]][d]
            yield TopKSite(e, operand, d, shape[d], row.index_result, best)


def experts_per_token(program: Program, expert_count: int) -> int | None:
    """Return the number of experts that a token chooses among `expert_count` experts; None if no equation tells."""
    return max((r.k for r in find_topk_sites(program) if r.size == expert_count and r.k is not None), default=None)
