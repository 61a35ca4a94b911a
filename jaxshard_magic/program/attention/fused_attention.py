"""Attention and its gradient as two JAX primitives, so that a loss holds no array of scores as a residual.

`attention` returns the result, and per query the maximal score and the sum of exponentials; `attention_gradient`
returns the gradients of queries, keys and values. Their own lowering runs over all keys at once; a sharding plan can
replace it with a ring.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .blockwise import (
    AttentionForm,
    accumulate_block,
    accumulation_dtype,
    attention_result,
    block_gradients,
    fully_masked_cotangent,
    initial_state,
    score_block,
)

attention_p = Primitive("attention")
attention_p.multiple_results = True
attention_gradient_p = Primitive("attention_gradient")
attention_gradient_p.multiple_results = True


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(form: AttentionForm, query: Any, key: Any, value: Any, *masks: Any) -> Any:
    """Return attention by `form`, with a custom derivative.

    Args:
        form: Form of the attention.
        query: Queries, (batch..., groups..., positions, width).
        key: Keys, (batch..., positions, width).
        value: Values, (batch..., positions, width), whose width may differ.
        masks: Arrays of the form's leaves. They have no gradient.
    """
    return attention_p.bind(query, key, value, *masks, form=form)[0]


def _attention_fwd(form: AttentionForm, query: Any, key: Any, value: Any, *masks: Any) -> tuple[Any, Any]:
    # The residuals have one number per query, not one per (query, key) pair: the scores are computed again.
    out, *query_statistics = attention_p.bind(query, key, value, *masks, form=form)
    return out, (query, key, value, masks, out, query_statistics)


def _attention_bwd(form: AttentionForm, residuals: Any, cotangent: Any) -> tuple:
    query, key, value, masks, out, (largest, total) = residuals
    delta = (cotangent.astype(total.dtype) * out.astype(total.dtype)).sum(-1)
    gradients = attention_gradient_p.bind(query, key, value, cotangent, largest, total, delta, *masks, form=form)
    return (*gradients, *(None for _ in masks))


attention.defvjp(_attention_fwd, _attention_bwd)


def full_attention(query: Any, key: Any, value: Any, *masks: Any, form: AttentionForm) -> list:
    """Compute `attention` over all keys at once."""
    all_keys = score_block(form, masks, 0, 0, (query.shape[-2], key.shape[-2]))
    state = accumulate_block(form, initial_state(form, query, value), query, key, value, all_keys)
    return [*attention_result(form, state, value.astype(accumulation_dtype(value.dtype)).mean(-2))]


def full_attention_gradient(
    query: Any,
    key: Any,
    value: Any,
    cotangent: Any,
    largest: Any,
    total: Any,
    delta: Any,
    *masks: Any,
    form: AttentionForm,
) -> list:
    """Compute `attention_gradient` over all keys at once.

    Args:
        query: Queries.
        key: Keys.
        value: Values.
        cotangent: Gradient of the result.
        largest: Maximal score of each query.
        total: Sum of exponentials of each query.
        delta: Sum over the width of the result times its gradient, for each query.
        masks: Arrays of the form's leaves.
        form: Form of the attention.
    """
    all_keys = score_block(form, masks, 0, 0, (query.shape[-2], key.shape[-2]))
    gradients = block_gradients(form, query, key, value, cotangent, (largest, total, delta), all_keys)
    return finish_gradients(
        form,
        (query, key, value),
        gradients,
        fully_masked_cotangent(form, cotangent, total) if form.mean_if_fully_masked else None,
    )


def finish_gradients(form: AttentionForm, operands: Sequence[Any], gradients: Sequence[Any], fully_masked: Any) -> list:
    """Cast gradients to the dtypes of their operands, and add the share of fully masked queries.

    Args:
        form: Form of the attention.
        operands: Queries, keys and values.
        gradients: Gradients of these, in the accumulation dtype.
        fully_masked: Summed gradient of all queries that saw nothing, to be divided evenly among all keys, as their
            result is the mean of all values; None for no such share.
    """
    queries, keys, values = gradients
    if fully_masked is not None:
        values = values + (fully_masked / operands[1].shape[-2])[..., None, :]
    return [x.astype(operand.dtype) for x, operand in zip((queries, keys, values), operands, strict=True)]


@attention_p.def_abstract_eval
def _attention_avals(query: Any, _key: Any, value: Any, *_masks: Any, form: AttentionForm) -> list:
    query_shape = query.shape[:-1]
    out = query.update(shape=(*query_shape, value.shape[-1]), dtype=jnp.dtype(form.dtype), weak_type=False)
    return [
        out,
        *[query.update(shape=query_shape, dtype=jnp.dtype(accumulation_dtype(query.dtype)), weak_type=False)] * 2,
    ]


@attention_gradient_p.def_abstract_eval
def _gradient_avals(query: Any, key: Any, value: Any, *_others: Any, form: AttentionForm) -> list:
    return [x.update(weak_type=False) for x in (query, key, value)]


for _primitive, _function in ((attention_p, full_attention), (attention_gradient_p, full_attention_gradient)):
    # Both are used unless a sharding plan replaces the equation with a ring.
    _primitive.def_impl(jax.jit(_function, static_argnames="form"))
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True))
