"""Blockwise attention: settings (`AttentionForm`), and arithmetic of a block of queries with a block of keys.

Arrays have the dimensions (batch..., groups..., position, width); keys and values have no groups. Scores, exponentials
and all sums are float32 (float64 for float64 operands); the operands of products keep their dtypes. Softmax is
accumulated block by block: running maximum, sum of exponentials, and weighted sum of values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .attention import (
    Attention,
    DistanceSpan,
    Expression,
    ExpressionLeaf,
    MaskCondition,
    evaluate,
    leaves,
    visibility_mask,
)


@dataclass(frozen=True, eq=False)
class AttentionForm:
    """All that defines an attention except for its operands.

    The arrays of masks and other score expressions belong to `leaves` and broadcast to (batch..., groups..., query,
    key).

    Attributes:
        batch: Number of batch dimensions.
        groups: Number of group dimensions.
        scale: Factor of the scores.
        span: Distances at which keys are visible.
        conditions: Further conditions on visible keys.
        mean_if_fully_masked: Whether a query without a visible key has the mean of all values; else NaN.
        score_mod: Expression of other changes of scores; None for no change.
        precision: Precision of the query-key product and of the product with the values.
        dtype: Dtype of the result.
    """

    batch: int
    groups: int
    scale: float
    span: DistanceSpan
    conditions: tuple[MaskCondition, ...]
    mean_if_fully_masked: bool
    score_mod: Expression | None
    precision: tuple[Any, Any]
    dtype: Any

    @cached_property
    def leaves(self) -> tuple[ExpressionLeaf, ...]:
        """Leaves of the conditions and of `score_mod`, in the order of their arrays."""
        tests = [condition.expression for condition in self.conditions]
        tests += [] if self.score_mod is None else [self.score_mod]
        return tuple(leaf for test in tests for leaf in leaves(test))

    @cached_property
    def dim_letters(self) -> tuple[str, str]:
        """Einsum letters of the batch and the group dimensions."""
        # Upper case, as `einsum` uses lower case for positions and widths.
        return "ABCDEFGH"[: self.batch], "PQRSTUVW"[: self.groups]

    def einsum(self, left: str, right: str, out: str, x: Any, y: Any, *, scores: bool) -> Any:
        """Compute an einsum with sums in the accumulation dtype.

        Args:
            left: Dimensions of `x`: t (queries), s (keys), d and e (widths); "*" for batch and groups, "." for batch
                alone.
            right: Dimensions of `y`.
            out: Dimensions of the result.
            x: First operand.
            y: Second operand.
            scores: Whether to use the precision of the query-key product; else of the product with the values.
        """
        batch, groups = self.dim_letters
        text = f"{left},{right}->{out}".replace("*", batch + groups).replace(".", batch)
        precision = self.precision[0 if scores else 1]
        return jnp.einsum(text, x, y, precision=precision, preferred_element_type=accumulation_dtype(x.dtype))


def attention_form(attention: Attention, dtype: Any) -> AttentionForm:
    """Return the form of a recognised attention.

    Args:
        attention: The attention. Repeats of keys and values become one more group dimension.
        dtype: Dtype of the result.
    """
    span, conditions = attention.visibility
    # If distance 0 is visible and there is no condition, each query sees at least its own position.
    may_be_fully_masked = bool(conditions) or not span.has_zero
    return AttentionForm(
        attention.batch,
        attention.groups + (attention.repeats is not None),
        attention.scale,
        span,
        conditions,
        may_be_fully_masked and bool(np.isfinite(attention.fill)),
        attention.score_mod,
        attention.precision,
        dtype,
    )


def accumulation_dtype(dtype: Any) -> Any:
    """Return the dtype in which sums over operands of `dtype` are accumulated."""
    return jnp.promote_types(dtype, jnp.float32)


PerQuery = tuple[Any, Any, Any]  # three arrays over (batch..., groups..., query)
SoftmaxState = PerQuery  # running maximum, sum of exponentials, and weighted sum of values (with a width dimension)


@dataclass(frozen=True)
class ScoreBlock:
    """Visibility and mask arrays of a block of queries with a block of keys.

    Attributes:
        visible: Boolean array, true where a query sees a key; None where all are visible.
        leaf_arrays: Arrays of the form's leaves, by the id of the leaf.
    """

    visible: Any
    leaf_arrays: Mapping[int, Any]


def score_block(
    form: AttentionForm, masks: Sequence[Any], first_query: Any, first_key: Any, sizes: tuple[int, int]
) -> ScoreBlock:
    """Return the block of `sizes` (queries, keys) at these positions.

    Args:
        form: Form of the attention.
        masks: Arrays of the form's leaves, already cut to these positions.
        first_query: Position of the first query; may be traced.
        first_key: Position of the first key; may be traced.
        sizes: Number of queries and of keys.
    """
    arrays = dict(zip(map(id, form.leaves), masks, strict=True))
    visible = visibility_mask(form.conditions, lambda leaf: arrays[id(leaf)]) if form.conditions else None
    low, high = form.span.low, form.span.high
    if low is None and high is None:
        return ScoreBlock(visible, arrays)
    distance = (first_query + jnp.arange(sizes[0]))[:, None] - (first_key + jnp.arange(sizes[1]))
    for within in (None if low is None else distance >= low, None if high is None else distance <= high):
        if within is not None:
            visible = within if visible is None else visible & within
    return ScoreBlock(visible, arrays)


def initial_state(form: AttentionForm, query: Any, value: Any) -> SoftmaxState:
    """Return the softmax state before any block.

    Args:
        form: Form of the attention.
        query: Block of queries.
        value: Any block of values; gives the width.
    """
    dtype = accumulation_dtype(query.dtype)
    query_shape = query.shape[:-1]
    sums = jnp.zeros((*query_shape, value.shape[-1]), dtype)
    return jnp.full(query_shape, -jnp.inf, dtype), jnp.zeros(query_shape, dtype), sums


def accumulate_block(
    form: AttentionForm, state: SoftmaxState, query: Any, key: Any, value: Any, block: ScoreBlock
) -> SoftmaxState:
    """Return the softmax state with one more block of keys.

    Args:
        form: Form of the attention.
        state: State so far.
        query: Block of queries.
        key: Block of keys.
        value: Block of values.
        block: Visibility of this block.
    """
    largest, total, sums = state
    scores = _masked_scores(block, _modified_scores(form, block, _scaled_scores(form, query, key)))
    new_largest = jnp.maximum(largest, scores.max(-1))
    # A query without a visible key so far has maximum -inf, and -inf - -inf is NaN.
    finite = jnp.where(new_largest == -jnp.inf, 0, new_largest)
    weights, rescale = jnp.exp(scores - finite[..., None]), jnp.exp(largest - finite)
    added = form.einsum("*ts", ".se", "*te", weights.astype(value.dtype), value, scores=False)
    return new_largest, total * rescale + weights.sum(-1), sums * rescale[..., None] + added


def attention_result(form: AttentionForm, state: SoftmaxState, mean: Any) -> tuple[Any, Any, Any]:
    """Return attention over all blocks, and per query the maximal score and the sum of exponentials relative to that
    maximum.

    A query that saw nothing has maximum 0 and sum inf.

    Args:
        form: Form of the attention.
        state: State after all blocks.
        mean: Mean of all values, (batch..., width); used where `form.mean_if_fully_masked`.
    """
    largest, total, sums = state
    out, fully_masked = sums / total[..., None], total == 0
    if form.mean_if_fully_masked:
        out = jnp.where(fully_masked[..., None], insert_query_dims(form, mean), out)
    # With maximum 0 and sum inf, `block_gradients` computes weights of 0 for fully masked queries instead of NaN.
    return (out.astype(form.dtype), jnp.where(fully_masked, 0, largest), jnp.where(fully_masked, jnp.inf, total))


def insert_query_dims(form: AttentionForm, x: Any) -> Any:
    """Reshape an array (batch..., width) so that it broadcasts against a result."""
    return x.reshape(*x.shape[:-1], *(1,) * (form.groups + 1), x.shape[-1])


def block_gradients(
    form: AttentionForm, query: Any, key: Any, value: Any, cotangent: Any, query_statistics: PerQuery, block: ScoreBlock
) -> tuple[Any, Any, Any]:
    """Return the gradients of one block's queries, keys and values, in the accumulation dtype.

    Args:
        form: Form of the attention.
        query: Block of queries.
        key: Block of keys.
        value: Block of values.
        cotangent: Gradient of the attention's result for these queries.
        query_statistics: Per query the maximal score, the sum of exponentials (both from `attention_result`), and the
            sum over the width of the result times its gradient.
        block: Visibility of this block.
    """
    largest, total, delta = (x[..., None] for x in query_statistics)
    scores, score_mod_vjp = jax.vjp(partial(_modified_scores, form, block), _scaled_scores(form, query, key))
    # Fully masked queries: exp(-inf - 0) / inf is 0.
    weights = jnp.exp(_masked_scores(block, scores) - largest) / total
    weight_gradient = form.einsum("*te", ".se", "*ts", cotangent, value, scores=False)
    (score_gradient,) = score_mod_vjp(weights * (weight_gradient - delta))
    # `score_mod` may have infinite derivatives at hidden scores, and 0 * inf is NaN.
    if form.score_mod is not None and block.visible is not None:
        score_gradient = jnp.where(block.visible, score_gradient, 0)
    score_gradient = (score_gradient * form.scale).astype(query.dtype)
    return (
        form.einsum("*ts", ".sd", "*td", score_gradient, key, scores=True),
        form.einsum("*ts", "*td", ".sd", score_gradient, query, scores=True),
        form.einsum("*ts", "*te", ".se", weights.astype(cotangent.dtype), cotangent, scores=False),
    )


def fully_masked_cotangent(form: AttentionForm, cotangent: Any, total: Any) -> Any:
    """Return the sum of the result's gradient over queries that saw nothing: (batch..., width).

    Args:
        form: Form of the attention.
        cotangent: Gradient of the result.
        total: Sums of exponentials; inf for a query that saw nothing.
    """
    masked_cotangent = jnp.where(jnp.isposinf(total)[..., None], cotangent.astype(total.dtype), 0)
    return masked_cotangent.sum(tuple(range(form.batch, masked_cotangent.ndim - 1)))


def _scaled_scores(form: AttentionForm, query: Any, key: Any) -> Any:
    return form.einsum("*td", ".sd", "*ts", query, key, scores=True) * form.scale


def _modified_scores(form: AttentionForm, block: ScoreBlock, scores: Any) -> Any:
    if form.score_mod is None:
        return scores
    modified = evaluate(form.score_mod, lambda leaf: block.leaf_arrays[id(leaf)], scores, scores.dtype)
    return jnp.broadcast_to(modified, scores.shape)


def _masked_scores(block: ScoreBlock, scores: Any) -> Any:
    return scores if block.visible is None else jnp.where(block.visible, scores, -jnp.inf)
