"""`Attention`: what is known of an attention that a program writes out, and `Unrecognised`, why one isn't known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..ir import Value


@dataclass(frozen=True)
class Span:
    """The distances (query position - key position) at which keys are seen: from `low` to `high`, None for no bound."""

    low: int | None = None
    high: int | None = None

    def __and__(self, other: "Span") -> "Span":
        lows = [x for x in (self.low, other.low) if x is not None]
        highs = [x for x in (self.high, other.high) if x is not None]
        return Span(max(lows, default=None), min(highs, default=None))

    @property
    def has_zero(self) -> bool:
        """Whether each query sees the key at its own position."""
        return (self.low or 0) <= 0 <= (self.high or 0)


@dataclass(frozen=True, eq=False)
class Leaf:
    """An operand of a mask or of what else is made of scores: `source`, a value of the program or a constant, whose
    dimensions are those of the scores that `dims` names, None for one of size 1. `truth`: whether it has truth values.
    """

    source: Value | np.ndarray
    dims: tuple[int | None, ...]
    truth: bool = False


@dataclass(frozen=True, eq=False)
class Apply:
    """An elementwise equation, on operands that are broadcast against each other."""

    eqn: JaxprEqn
    operands: tuple["Test", ...]


@dataclass(frozen=True, eq=False)
class Scores:
    """The product of queries and keys, times the scale, where something is made of it."""


Test = Leaf | Apply | Scores  # what tells something of each query and key


@dataclass(frozen=True, eq=False)
class Condition:
    """A key is seen by a query where `test` is true, or where it is false (`holds`)."""

    test: Test
    holds: bool = True


@dataclass(frozen=True)
class Operand:
    """A value of the program, its dimensions in an order of their own; those left out have size 1."""

    value: Value
    dims: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """`softmax(mask(change(scale * query . key))) . value`, written out in a program.

    `equation`: by index, the product with the values. What lies between that and the product with the keys, and is read
    by nothing else, is no longer needed where something else makes its result.

    `query` has the dimensions (batch..., groups..., position, width), `key` and `value` (batch..., position, width):
    `batch` and `groups` say how many. The queries of a group meet the same keys. Where keys and values are repeated,
    `key` and `value` are those before, and `repeats` is (dimension of the batch, how often).

    Key positions are seen at distances in `span` where all `conditions` are met too, whose tests have the dimensions
    (batch..., groups..., query, key). A query that sees nothing has the mean of all values where `fill`, which takes
    the place of other scores, is finite, and nan where it is -inf. `change`: what else is made of scores, such as a cap
    or a bias; None for nothing. Where it is more than who is seen that counts, as of a query that may see nothing under
    two masks that are added, `exact` is true, and `change` has the masks in it as written: no key can be left out.

    `factors`: what queries are multiplied by, or divided by where true; with one key.

    `order`: the place among (batch..., groups..., position, width) of each dimension of the result, None for one of
    size 1. `precision`: of both products.
    """

    equation: int
    query: Operand
    key: Operand
    value: Operand
    batch: int
    groups: int
    scale: float
    span: Span
    conditions: tuple[Condition, ...]
    fill: float
    order: tuple[int | None, ...]
    precision: tuple[Any, Any]
    repeats: tuple[int, int] | None = None
    change: Test | None = None
    exact: bool = False
    factors: tuple[tuple[Test, bool], ...] = ()

    @property
    def left_out(self) -> tuple[Span, tuple[Condition, ...]]:
        """The distances and the conditions that keys are left out by."""
        return (Span(), ()) if self.exact else (self.span, self.conditions)


@dataclass(frozen=True)
class Unrecognised:
    """An attention that `operation` makes another computation of. `line`: the user's line that it stands in, None where
    none is known."""

    operation: str
    line: str | None


Found = Sequence[Attention | Unrecognised]
