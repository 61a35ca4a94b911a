"""Data of a recognised attention (`Attention`), and of an attempt that failed (`Unrecognised`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..ir import Value


@dataclass(frozen=True)
class DistanceSpan:
    """Range of distances (query position - key position) at which keys are visible.

    Attributes:
        low: Smallest distance; None for no bound.
        high: Largest distance; None for no bound.
    """

    low: int | None = None
    high: int | None = None

    def __and__(self, other: "DistanceSpan") -> "DistanceSpan":
        """Return the intersection of both ranges."""
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return DistanceSpan(max(lows, default=None), min(highs, default=None))

    @property
    def has_zero(self) -> bool:
        """True if each query sees the key at the query's own position."""
        return (self.low or 0) <= 0 <= (self.high or 0)


@dataclass(frozen=True, eq=False)
class ExpressionLeaf:
    """Operand of a mask or of another elementwise change of scores.

    Attributes:
        source: Value of the program, or a constant array.
        dims: Position of each dimension of `source` among the dimensions of the scores; None for a dimension of size 1.
        is_boolean: Whether `source` holds booleans.
    """

    source: Value | np.ndarray
    dims: tuple[int | None, ...]
    is_boolean: bool = False


@dataclass(frozen=True, eq=False)
class Apply:
    """Elementwise equation on operands broadcast against each other.

    Attributes:
        eqn: Equation to bind.
        operands: Expressions, one for each operand.
    """

    eqn: JaxprEqn
    operands: tuple["Expression", ...]


@dataclass(frozen=True, eq=False)
class Scores:
    """Placeholder for the scaled product of queries and keys inside an expression."""


Expression = ExpressionLeaf | Apply | Scores  # a number or boolean for each (query, key) pair


@dataclass(frozen=True, eq=False)
class MaskCondition:
    """Condition on (query, key) pairs.

    Attributes:
        expression: Boolean expression.
        visible_if: Value of `expression` at which the query sees the key.
    """

    expression: Expression
    visible_if: bool = True


@dataclass(frozen=True)
class AttentionOperand:
    """Value of the program with its dimensions in another order.

    Attributes:
        value: The value.
        dims: Dimensions of `value`, in the order of use. Dimensions left out have size 1.
    """

    value: Value
    dims: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention written out in a program: `softmax(mask(score_mod(scale * query . key))) . value`.

    All equations between the two products and read by nothing else are dead once another computation makes the result.

    A query without a visible key has the mean of all values where `fill` is finite, and NaN where `fill` is -inf.

    Attributes:
        equation_index: Index of the last equation: the product with the values, or the division after it.
        query: Queries, (batch..., groups..., position, width). All queries of a group meet the same keys.
        key: Keys, (batch..., position, width). Repeated keys are given as they are before the repetition.
        value: Values, (batch..., position, width), before their repetition as well.
        batch: Number of batch dimensions.
        groups: Number of group dimensions.
        scale: Factor of the scores.
        span: Distances at which keys are visible.
        conditions: Further conditions on visible keys; all must be met. Dimensions of their expressions: (batch...,
            groups..., query, key).
        fill: Number that replaces the scores of hidden keys.
        result_order: Position among (batch..., groups..., position, width) of each dimension of the result; None for a
            dimension of size 1.
        precision: Precision of the query-key product and of the product with the values.
        repeats: (batch dimension, count) where keys and values are repeated for groups of queries; else None.
        score_mod: Expression of all other changes of scores, such as a cap or a bias; None for no change.
        masks_in_score_mod: Whether `score_mod` has the masks in it as written, so that no key can be skipped. Needed
            where the result depends on hidden scores, as for a query that may see nothing under two added masks.
        query_factors: Factors of the queries, each with True for a divisor. Their key dimension has size 1.
    """

    equation_index: int
    query: AttentionOperand
    key: AttentionOperand
    value: AttentionOperand
    batch: int
    groups: int
    scale: float
    span: DistanceSpan
    conditions: tuple[MaskCondition, ...]
    fill: float
    result_order: tuple[int | None, ...]
    precision: tuple[Any, Any]
    repeats: tuple[int, int] | None = None
    score_mod: Expression | None = None
    masks_in_score_mod: bool = False
    query_factors: tuple[tuple[Expression, bool], ...] = ()

    @property
    def visibility(self) -> tuple[DistanceSpan, tuple[MaskCondition, ...]]:
        """Distances and conditions by which keys can be skipped; unrestricted where masks are part of `score_mod`."""
        return (DistanceSpan(), ()) if self.masks_in_score_mod else (self.span, self.conditions)


@dataclass(frozen=True)
class Unrecognised:
    """Attention that one operation turns into another computation.

    Attributes:
        operation: Name of that operation.
        line: Source line in the user's code; None where unknown.
    """

    operation: str
    line: str | None


DetectionResults = Sequence[Attention | Unrecognised]
