"""Data of a recognised attention (`Attention`), and of an attempt that failed (`Unrecognised`).

Changes of its scores are expressions. They are evaluated for a block at run time, or for all of their possible values
at trace time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..ir import Value
from ..primitives import bind
from ..primitives.jaxprs import bind_with_dtype

_MAX_BOOLEANS = 4  # all 2 ** 4 assignments are evaluated


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


def leaves(expression: Expression) -> Iterator[ExpressionLeaf]:
    """Yield the leaves of an expression, in order."""
    if isinstance(expression, ExpressionLeaf):
        yield expression
    elif isinstance(expression, Apply):
        for operand in expression.operands:
            yield from leaves(operand)


def evaluate(
    expression: Expression, array_of: Callable[[ExpressionLeaf], Any], scores: Any = None, dtype: Any = None
) -> Any:
    """Return the array of an expression.

    Args:
        expression: Expression. The arrays of its leaves broadcast against each other.
        array_of: Function from a leaf to its array.
        scores: Array for `Scores`.
        dtype: Dtype of all floats; None to keep the dtypes as they are.
    """
    if isinstance(expression, Scores):
        return scores
    if isinstance(expression, ExpressionLeaf):
        x = jnp.asarray(array_of(expression))
        return x.astype(dtype) if dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x
    # Primitives, unlike functions of `jax.numpy`, don't broadcast their operands.
    operands = jnp.broadcast_arrays(*(evaluate(x, array_of, scores, dtype) for x in expression.operands))
    return (bind(expression.eqn, operands) if dtype is None else bind_with_dtype(expression.eqn, operands, dtype))[0]


def visibility_mask(conditions: Sequence[MaskCondition], array_of: Callable[[ExpressionLeaf], Any]) -> Any:
    """Return a boolean array, true where all conditions are met; the Python value True without conditions.

    Args:
        conditions: Conditions to combine.
        array_of: Function from a leaf to its array.
    """
    visible: Any = True
    for condition in conditions:
        boolean = evaluate(condition.expression, array_of).astype(bool)
        visible = visible & (boolean if condition.visible_if else ~boolean)
    return visible


def align_dims(x: Any, dims: Sequence[int | None], rank: int) -> Any:
    """Transpose and reshape an array so that its dimensions are at the positions `dims` of `rank` dimensions.

    Args:
        x: Array.
        dims: Target position of each dimension of `x`; None for a dimension of size 1, which is removed.
        rank: Number of dimensions of the result. All others have size 1.

    >>> align_dims(np.ones((3, 1, 2)), (2, None, 0), 4).shape
    (2, 1, 3, 1)
    """
    sizes = dict(zip(dims, x.shape, strict=True))
    kept_dims = sorted((d, k) for k, d in enumerate(dims) if d is not None)
    order = [*(k for _, k in kept_dims), *(k for k, d in enumerate(dims) if d is None)]
    return x.transpose(order).reshape([sizes.get(d, 1) for d in range(rank)])


def is_constant(leaf: ExpressionLeaf) -> bool:
    """Return whether the numbers of a leaf are known before the program runs."""
    return isinstance(leaf.source, np.ndarray)


def is_boolean(expression: Expression) -> bool:
    """Return whether an expression is boolean."""
    if isinstance(expression, Apply):
        return str(getattr(expression.eqn.outvars[0].aval, "dtype", "")) == "bool"
    return isinstance(expression, ExpressionLeaf) and (
        expression.is_boolean or (is_constant(expression) and np.asarray(expression.source).dtype == bool)
    )


def truth_table(expression: Expression) -> tuple[list[Expression], Mapping[tuple[bool, ...], float]] | None:
    """Return the booleans that decide the number `expression`, and a table from their values to that number.

    None unless 1 to `_MAX_BOOLEANS` booleans, and nothing else, decide it.
    """
    booleans: dict[int, tuple[Expression, Any]] = {}
    if not _collect_booleans(expression, booleans) or not 0 < len(booleans) <= _MAX_BOOLEANS:
        return None
    numbers = {}
    # Recognition can run while JAX traces, where `bind` would return tracers instead of numbers.
    with jax.ensure_compile_time_eval():
        for assignment in product((False, True), repeat=len(booleans)):
            assigned_numbers = {k: two[assignment[i]] for i, (k, (_, two)) in enumerate(booleans.items())}
            numbers[assignment] = float(_number_under(expression, assigned_numbers))
    return [truth for truth, _ in booleans.values()], numbers


def _collect_booleans(expression: Expression, booleans: dict[int, tuple[Expression, Any]]) -> bool:
    """Return whether an expression is made of booleans and single numbers alone.

    Collects the booleans in `booleans`, by id, each with the two numbers that it stands for. A constant array of two
    different numbers counts as a boolean.
    """
    if is_boolean(expression) and not (isinstance(expression, ExpressionLeaf) and _leaf_size(expression) == 1):
        booleans[id(expression)] = expression, (np.False_, np.True_)
        return True
    if isinstance(expression, Apply):
        return all(_collect_booleans(operand, booleans) for operand in expression.operands)
    if not isinstance(expression, ExpressionLeaf) or not is_constant(expression):
        return False
    x = np.asarray(expression.source)
    if x.size > 1:
        low, high = x.min(), x.max()
        if low == high or not ((x == low) | (x == high)).all():
            return False
        booleans[id(expression)] = ExpressionLeaf(x == high, expression.dims), (low, high)
    return True


def _number_under(expression: Expression, assigned_numbers: Mapping[int, Any]) -> Any:
    """Return the number of an expression under an assignment of its booleans."""
    if id(expression) in assigned_numbers:
        return jnp.asarray(assigned_numbers[id(expression)])
    if isinstance(expression, ExpressionLeaf):
        return jnp.asarray(expression.source).reshape(())
    assert isinstance(expression, Apply)
    return bind(expression.eqn, [_number_under(operand, assigned_numbers) for operand in expression.operands])[0]


def _leaf_size(leaf: ExpressionLeaf) -> int:
    """Return the element count of a constant leaf; 2, as any number above 1, for a value of the program."""
    return np.asarray(leaf.source).size if is_constant(leaf) else 2
