"""Attention as one primitive, and its gradient as another: a loss with these has no array of scores.

`attention` gives the result and, for each query, its largest score and the sum of exponentials; `attention_gradient`
the gradients of queries, keys and values. Without more they are run over all keys at once; a plan has a ring of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from .form import Form, backward, blind_sum, block, forward, result, start, wide

attention_p = Primitive("attention")
attention_p.multiple_results = True
attention_gradient_p = Primitive("attention_gradient")
attention_gradient_p.multiple_results = True


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(form: Form, query: Any, key: Any, value: Any, *masks: Any) -> Any:
    """Attention by `form`, with a derivative of its own.

    Args:
        query: (batch..., groups..., positions, width).
        key: (batch..., positions, width).
        value: (batch..., positions, width), maybe another.
        masks: the arrays of the form's leaves.
    """
    return attention_p.bind(query, key, value, *masks, form=form)[0]


def _kept(form: Form, query: Any, key: Any, value: Any, *masks: Any) -> tuple[Any, Any]:
    out, *rows = attention_p.bind(query, key, value, *masks, form=form)
    return out, (query, key, value, masks, out, rows)


def _back(form: Form, kept: Any, given: Any) -> tuple:
    query, key, value, masks, out, (largest, total) = kept
    delta = (given.astype(total.dtype) * out.astype(total.dtype)).sum(-1)
    found = attention_gradient_p.bind(query, key, value, given, largest, total, delta, *masks, form=form)
    return (*found, *(None for _ in masks))


attention.defvjp(_kept, _back)


def whole(query: Any, key: Any, value: Any, *masks: Any, form: Form) -> list:
    """`attention` over all keys at once."""
    at = block(form, masks, 0, 0, (query.shape[-2], key.shape[-2]))
    state = forward(form, start(form, query, value), query, key, value, at)
    return [*result(form, state, value.astype(wide(value.dtype)).mean(-2))]


def whole_gradient(
    query: Any,
    key: Any,
    value: Any,
    given: Any,
    largest: Any,
    total: Any,
    delta: Any,
    *masks: Any,
    form: Form,
) -> list:
    """`attention_gradient` over all keys at once."""
    at = block(form, masks, 0, 0, (query.shape[-2], key.shape[-2]))
    found = backward(form, query, key, value, given, (largest, total, delta), at)
    return settled(form, (query, key, value), found, blind_sum(form, given, total) if form.uniform else None)


def settled(form: Form, operands: Sequence[Any], found: Sequence[Any], blind: Any) -> list:
    """Gradients in the types of what they are of, with those of the mean that queries have which see nothing; `blind`:
    what `blind_sum` gives for all of them, divided among all keys."""
    queries, keys, values = found
    if blind is not None:
        values = values + (blind / operands[1].shape[-2])[..., None, :]
    return [x.astype(of.dtype) for x, of in zip((queries, keys, values), operands, strict=True)]


@attention_p.def_abstract_eval
def _avals(query: Any, _key: Any, value: Any, *_masks: Any, form: Form) -> list:
    rows = query.shape[:-1]
    out = query.update(shape=(*rows, value.shape[-1]), dtype=jnp.dtype(form.dtype), weak_type=False)
    return [out, *[query.update(shape=rows, dtype=jnp.dtype(wide(query.dtype)), weak_type=False)] * 2]


@attention_gradient_p.def_abstract_eval
def _gradient_avals(query: Any, key: Any, value: Any, *_others: Any, form: Form) -> list:
    return [x.update(weak_type=False) for x in (query, key, value)]


for _primitive, _function in ((attention_p, whole), (attention_gradient_p, whole_gradient)):
    _primitive.def_impl(jax.jit(_function, static_argnames="form"))
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True))
