"""Visibility of keys: a mask as written, read as a range of distances plus conditions on inputs.

The operands of a mask are followed back to values that lack a query or a key dimension: to positions (`iota`), whose
comparisons are distances, and to inputs such as lengths, padding and segment numbers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ir import Value
from ..primitives.primitive import Kind
from .attention import (
    Apply,
    DistanceSpan,
    Expression,
    ExpressionLeaf,
    MaskCondition,
    align_dims,
    evaluate,
    is_boolean,
    is_constant,
    leaves,
    truth_table,
    visibility_mask,
)
from .backward_walk import BackwardWalk, Labels, literal_array

MASKED_SCORE = -1e4  # scores this far below the others hide a key: exp gives 0 even in float64
_SAMPLED_POSITIONS = 256  # queries, and keys, that are evaluated above `_MAX_FULL_POSITIONS`
_MAX_FULL_POSITIONS = 2048
_MAX_DEPTH = 32  # nested equations of an expression


@dataclass(frozen=True)
class KeyVisibility:
    """Visible keys of each query.

    Attributes:
        span: Distances at which keys are visible.
        conditions: Further conditions; all must be met.
    """

    span: DistanceSpan
    conditions: tuple[MaskCondition, ...]


def read_expression(
    walk: BackwardWalk, v: Value, labels: Labels, rank: int, *, to_booleans: bool = False
) -> Expression | None:
    """Return a value as an expression over (query, key); None for a value with other dimensions.

    Args:
        walk: Backward walk of the program that makes the value.
        v: Value of any dtype.
        labels: Position of each of its dimensions among (batch..., groups..., query, key).
        rank: Number of these dimensions.
        to_booleans: Whether to go back to booleans even from values that lack a query or a key dimension.
    """
    return _ExpressionReader(walk, rank, to_booleans).read(v, labels)


def key_visibility(conditions: Sequence[MaskCondition], rank: int) -> KeyVisibility:
    """Divide the visibility of keys into a range of distances and conditions on inputs.

    Args:
        conditions: Conditions of a mask; all must be met.
        rank: Rank of the scores.
    """
    span, others = DistanceSpan(), []
    for condition in (part for whole in conditions for part in _conjuncts(whole)):
        distances = _distance_span(condition, rank)
        if distances is None:
            others.append(condition)
        else:
            span &= distances
    return KeyVisibility(span, tuple(others))


def read_additive_mask(expression: Expression, factor: float) -> tuple[list[MaskCondition], float] | None:
    """Read numbers added to scores as a mask.

    Returns the conditions under which keys are visible, where the number is 0, and the largest number added elsewhere,
    times `factor`. None unless all other numbers, times `factor`, are so small (at most `MASKED_SCORE`) that they hide
    keys.

    Args:
        expression: Numbers added.
        factor: Factor of the numbers before the softmax.
    """
    table = truth_table(expression)
    if table is None:
        return None
    booleans, numbers = table
    visible = [way for way, x in numbers.items() if x == 0]
    fills = [x * factor for x in numbers.values() if x != 0]
    if not visible or not fills or not all(x <= MASKED_SCORE for x in fills):
        return None
    # Several assignments give 0, so the mask is no conjunction of single booleans.
    if len(visible) > 1:
        return [MaskCondition(expression, False)], max(fills)
    return [MaskCondition(truth, holds) for truth, holds in zip(booleans, visible[0], strict=True)], max(fills)


def read_multiplicative_mask(expression: Expression) -> list[MaskCondition] | None:
    """Read numbers multiplied with exponentials as a mask: conditions under which they are 1; None unless all are 0 or
    1."""
    table = truth_table(expression)
    if table is None or not set(table[1].values()) <= {0.0, 1.0}:
        return None
    ones = [way for way, x in table[1].items() if x == 1]
    if len(ones) != 1:
        return [MaskCondition(expression)]
    return [MaskCondition(truth, holds) for truth, holds in zip(table[0], ones[0], strict=True)]


def score_bounds(expression: Expression, rank: int) -> tuple[float, float] | None:
    """Return the least and the greatest value of `expression` at scores of 0; None where it depends on inputs.

    Only the first, the middle and the last query are evaluated.
    """
    expression_leaves = list(leaves(expression))
    if not all(map(is_constant, expression_leaves)):
        return None
    arrays = {id(leaf): align_dims(leaf.source, leaf.dims, rank) for leaf in expression_leaves}
    queries = max((x.shape[-2] for x in arrays.values()), default=1)
    rows = np.unique([0, queries // 2, queries - 1])
    sampled = {k: x[..., rows, :] if x.shape[-2] > 1 else x for k, x in arrays.items()}
    with jax.ensure_compile_time_eval():
        numbers = np.asarray(evaluate(expression, lambda leaf: sampled[id(leaf)], jnp.zeros(()), jnp.float32))
    return float(numbers.min()), float(numbers.max())


@dataclass(frozen=True)
class _ExpressionReader:
    """Reader of values as expressions over (query, key).

    Attributes:
        walk: Backward walk of the program.
        rank: Rank of the scores.
        to_booleans: Whether to go back to booleans even from values that lack a query or a key dimension.
    """

    walk: BackwardWalk
    rank: int
    to_booleans: bool

    def read(self, v: Value, labels: Labels, depth: int = 0) -> Expression | None:
        walk, shapes = self.walk, self.walk.program.shapes
        while (e := walk.producer(v)) is not None and e.primitive.kind is Kind.SHAPE:
            if e.operands[0] is None:
                return _literal_leaf(e.jaxpr_eqn.invars[0])
            if (source_labels := walk.operand_labels(e, labels)) is None:
                break
            v, labels = e.operands[0], source_labels
        v = walk.resolve(v)
        long_dims = {x for x, z in zip(labels, shapes[v], strict=True) if z > 1}
        dims = tuple(x if isinstance(x, int) else None for x in labels)
        if not all(isinstance(x, int) for x in long_dims):
            return None
        is_boolean_value = walk.program.avals[v].dtype == bool
        # A value that lacks a query or a key dimension, such as a length, is an input of the mask.
        is_expanded = {self.rank - 2, self.rank - 1} <= long_dims or (
            self.to_booleans and not is_boolean_value and depth < _MAX_DEPTH
        )
        if is_expanded and e is not None:
            if e.name == "iota":
                d = e.params["dimension"]
                return ExpressionLeaf(np.arange(shapes[v][d], dtype=e.params["dtype"]), (dims[d],))
            if e.primitive.is_elementwise and not e.jaxpr_eqn.effects:
                operands = [
                    _literal_leaf(var) if w is None else self.read(w, labels if shapes[w] else (), depth + 1)
                    for w, var in zip(e.operands, e.jaxpr_eqn.invars, strict=True)
                ]
                if None not in operands:
                    return Apply(e.jaxpr_eqn, tuple(operands))  # pyright: ignore[reportArgumentType]
        known = walk.constant(v)
        return ExpressionLeaf(v if known is None else known, dims, is_boolean_value)


def _literal_leaf(literal: Any) -> ExpressionLeaf:
    return ExpressionLeaf(literal_array(literal), ())


def _conjuncts(condition: MaskCondition) -> Iterator[MaskCondition]:
    """Yield the conditions whose conjunction is `condition`."""
    expression, visible_if = condition.expression, condition.visible_if
    if isinstance(expression, ExpressionLeaf):
        known = expression.source if isinstance(expression.source, np.ndarray) else None
        # A constant that meets the condition at all pairs adds nothing.
        if known is None or known.ndim or bool(known) != visible_if:
            yield condition
        return
    if not isinstance(expression, Apply):
        return
    name, operands = expression.eqn.primitive.name, expression.operands
    is_boolean_expression = is_boolean(expression)
    if name == "convert_element_type" and is_boolean(operands[0]):
        yield from _conjuncts(MaskCondition(operands[0], visible_if))
    elif name == "not" and is_boolean_expression:
        yield from _conjuncts(MaskCondition(operands[0], not visible_if))
    elif (name == "and" and is_boolean_expression and visible_if) or (
        # By De Morgan, `or` is false only where both operands are.
        name == "or" and is_boolean_expression and not visible_if
    ):
        for operand in operands:
            yield from _conjuncts(MaskCondition(operand, visible_if))
    elif (
        name in ("ne", "gt")
        and _is_zero(operands[1])
        # A product of zeros and ones is positive only where all factors are 1.
        and (factors := _boolean_factors(operands[0]))
        and (visible_if or len(factors) == 1)
    ):
        for boolean in factors:
            yield from _conjuncts(MaskCondition(boolean, visible_if))
    elif name == "select_n" and is_boolean_expression and visible_if and len(operands) == 3 and _is_zero(operands[1]):
        # `select_n(a, False, b)` is `a and b`.
        yield from _conjuncts(MaskCondition(operands[0]))
        yield from _conjuncts(MaskCondition(operands[2]))
    else:
        yield condition


def _boolean_factors(expression: Expression) -> list[Expression]:
    """Return the booleans whose product, as numbers, is `expression`; empty for another expression."""
    if not isinstance(expression, Apply):
        return []
    name = expression.eqn.primitive.name
    if name == "convert_element_type":
        return (
            [expression.operands[0]] if is_boolean(expression.operands[0]) else _boolean_factors(expression.operands[0])
        )
    if name == "mul":
        factors = [_boolean_factors(operand) for operand in expression.operands]
        return [t for part in factors for t in part] if all(factors) else []
    return []


def _is_zero(expression: Expression) -> bool:
    return (
        isinstance(expression, ExpressionLeaf)
        and isinstance(expression.source, np.ndarray)
        and not expression.source.any()
    )


def _distance_span(condition: MaskCondition, rank: int) -> DistanceSpan | None:
    """Return the range of distances at which a condition is met; None where it depends on more than the distance.

    Above `_MAX_FULL_POSITIONS` positions, where the mask only compares positions, a sample of queries against all keys
    and a sample of keys against all queries is evaluated instead of the full grid.
    """
    expression_leaves = list(leaves(condition.expression))
    if not all(map(is_constant, expression_leaves)):
        return None
    arrays = {id(leaf): align_dims(leaf.source, leaf.dims, rank) for leaf in expression_leaves}
    sizes = np.broadcast_shapes(*(x.shape for x in arrays.values()))
    *others, queries, keys = (1,) * (rank - len(sizes)) + sizes
    if max(others, default=1) > 1 or queries != keys:
        return None
    all_positions = sampled_positions = np.arange(queries)
    if queries > _MAX_FULL_POSITIONS and all(map(_is_consecutive, arrays.values())):
        sampled_positions = np.unique(np.linspace(0, queries - 1, _SAMPLED_POSITIONS).astype(int))

    def visibility_at(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return visibility and distance of these queries (rows) and keys (columns)."""
        sampled = {k: _take_positions(_take_positions(x, -2, rows), -1, columns) for k, x in arrays.items()}
        with jax.ensure_compile_time_eval():
            visible = visibility_mask([condition], lambda leaf: jnp.asarray(sampled[id(leaf)]))
        sizes = len(rows), len(columns)
        return np.broadcast_to(np.asarray(visible), (*others, *sizes)).reshape(sizes), rows[:, None] - columns

    samples = [
        visibility_at(sampled_positions, all_positions),
        *([] if sampled_positions is all_positions else [visibility_at(all_positions, sampled_positions)]),
    ]
    visible, distance = samples[0]
    if not visible.any():
        return None
    low, high = int(distance[visible].min()), int(distance[visible].max())
    if not all((seen == ((distance >= low) & (distance <= high))).all() for seen, distance in samples):
        return None
    # A bound that all pairs of positions satisfy is no bound.
    return DistanceSpan(low if low > 1 - keys else None, high if high < queries - 1 else None)


def _take_positions(x: np.ndarray, dim: int, positions: np.ndarray) -> np.ndarray:
    return x.take(positions, dim) if x.shape[dim] > 1 else x


def _is_consecutive(x: np.ndarray) -> bool:
    """Return whether the array is one number or consecutive integers."""
    flat = x.reshape(-1)
    return flat.size == 1 or (x.shape.count(1) == x.ndim - 1 and bool((np.diff(flat.astype(int)) == 1).all()))
