"""Evaluation of score expressions: for a block at run time, or for all of their possible values at trace time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..primitives import bind
from ..primitives.jaxprs import bind_with_dtype
from .attention import Apply, Expression, ExpressionLeaf, MaskCondition, Scores

_MAX_BOOLEANS = 4  # all 2 ** 4 assignments are evaluated


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
