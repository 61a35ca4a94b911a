"""Attentions in the forms that people write them, of queries, keys and values (batch, position, head, width)."""

from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def causal(t: int) -> Any:
    return jnp.tril(jnp.ones((t, t), bool))


def window(t: int, size: int = 5) -> Any:
    at = jnp.arange(t)
    distance = at[:, None] - at[None]
    return (distance >= 0) & (distance < size)


def by_hand(q, k, v, mask=None):
    """Heads first, `@`, softmax of jax."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) / jnp.sqrt(q.shape[-1])
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return (jax.nn.softmax(scores, axis=-1) @ v).swapaxes(1, 2)


def einsum(q, k, v, mask=None):
    """Scaled before, max, exp and sum by hand."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    z = jnp.exp(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bhqk,bkhd->bqhd", z / z.sum(-1, keepdims=True), v)


def divided_later(q, k, v, mask=None):
    """Exponentials meet the values first, and their sum divides what comes of it."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    z = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return (jnp.einsum("bhqk,bkhd->bhqd", z, v) / z.sum(-1)[..., None]).swapaxes(1, 2)


def added(q, k, v, mask=None):
    """The mask added, softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores + jnp.where(mask, 0.0, -1e9).astype(scores.dtype)
    probabilities = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


def of_jax(q, k, v, mask=None):
    return jax.nn.dot_product_attention(q, k, v, mask=None if mask is None else jnp.broadcast_to(mask, mask.shape))


def of_nnx(q, k, v, mask=None):
    return nnx.dot_product_attention(q, k, v, mask=mask)


def of_linen(q, k, v, mask=None):
    return linen.dot_product_attention(q, k, v, mask=mask)


def grouped(q, k, v, mask=None):
    """Half as many heads of keys and values, met by groups of queries."""
    b, t, n, h = q.shape
    k, v = k[:, :, ::2], v[:, :, ::2]
    q = q.reshape(b, t, n // 2, 2, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k) * h**-0.5
    if mask is not None:
        scores = jnp.where(mask if mask.ndim == 2 else mask[:, :, None], scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores), v).reshape(b, t, n, h)


def repeated(q, k, v, mask=None):
    """Half as many heads of keys and values, repeated."""
    k, v = (jnp.repeat(x[:, :, ::2], 2, axis=2) for x in (k, v))
    return by_hand(q, k, v, mask)


FORMS = {f.__name__: f for f in (by_hand, einsum, divided_later, added, of_jax, of_nnx, of_linen, grouped, repeated)}


def scores_of(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5


def mixed(probabilities, v):
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


def later_hidden(t):
    """1 where a key comes after the query, else 0."""
    return 1.0 - jnp.tril(jnp.ones((t, t)))


def subtracted(q, k, v, seen):
    """A mask of numbers subtracted."""
    return mixed(jax.nn.softmax(scores_of(q, k) - 1e6 * later_hidden(q.shape[1])), v)


def times_mask(q, k, v, seen):
    """Scores times the mask, less what hides the rest."""
    past = causal(q.shape[1]).astype(q.dtype)
    return mixed(jax.nn.softmax(scores_of(q, k) * past - 1e10 * (1 - past)), v)


def two_masks(q, k, v, seen):
    """One put in by `where`, one of numbers added."""
    scores = jnp.where(causal(q.shape[1]), scores_of(q, k), jnp.finfo(q.dtype).min)
    return mixed(jax.nn.softmax(scores + (1.0 - seen[:, None, None].astype(q.dtype)) * -1e9), v)


def of_logarithms(q, k, v, seen):
    """Exponentials of what the logarithm of their sum is subtracted from, of a mask's logarithm."""
    scores = scores_of(q, k) + jnp.log(jnp.tril(jnp.ones((q.shape[1],) * 2)))
    return mixed(jnp.exp(scores - jax.nn.logsumexp(scores, -1, keepdims=True)), v)


def of_log_softmax(q, k, v, seen):
    return mixed(jnp.exp(jax.nn.log_softmax(jnp.where(causal(q.shape[1]), scores_of(q, k), -1e9))), v)


def exponentials_masked(q, k, v, seen):
    """With a scale of each query's own, which has a gradient."""
    scores = scores_of(q, k) * jax.nn.sigmoid(q.mean(-1)).swapaxes(1, 2)[..., None]
    e = jnp.exp(scores - scores.max(-1, keepdims=True)) * causal(q.shape[1])
    return mixed(e * (1 / e.sum(-1, keepdims=True)), v)


def softmax_where(q, k, v, seen):
    scores = scores_of(q, k)
    return mixed(jax.nn.softmax(scores, where=jnp.broadcast_to(causal(q.shape[1]), scores.shape)), v)


def a_little_more(q, k, v, seen):
    """The sum kept from 0 by what is nothing beside it."""
    scores = jnp.where(causal(q.shape[1]), scores_of(q, k), -1e9)
    e = jnp.exp(scores - scores.max(-1, keepdims=True))
    return mixed(e / (e.sum(-1, keepdims=True) + 1e-9), v)


def by_distance(q, k, v, seen):
    """A cap, and a bias that grows with the distance, of each head by itself."""
    at, slopes = jnp.arange(q.shape[1]), jnp.array([0.5**i for i in range(q.shape[2])])
    scores = 3 * jnp.tanh(scores_of(q, k) / 3) - slopes[:, None, None] * jnp.abs(at[:, None] - at)
    return mixed(jax.nn.softmax(jnp.where(causal(q.shape[1]), scores, -1e9)), v)


def groups_merged(q, k, v, seen):
    """Scores of grouped queries with groups as one dimension for the mask."""
    b, t, n, h = q.shape
    scores = jnp.einsum("btkgh,bskh->btkgs", q.reshape(b, t, n // 2, 2, h), k[:, :, ::2]).reshape(b, t, n, t)
    e = jax.nn.softmax(jnp.where(causal(t)[:, None], scores, -1e9)).reshape(b, t, n // 2, 2, t)
    return jnp.einsum("btkgs,bskh->btkgh", e, v[:, :, ::2]).reshape(q.shape)


def heads_merged(q, k, v, seen):
    """Examples and heads as one dimension, but for the mask."""
    b, t, n, h = q.shape
    q, k, v = (x.swapaxes(1, 2).reshape(b * n, t, h) for x in (q, k, v))
    scores = (q @ k.swapaxes(1, 2)).reshape(b, n, t, t) - 1e9 * later_hidden(t)
    return (jax.nn.softmax(scores.reshape(b * n, t, t)) @ v).reshape(b, n, t, h).swapaxes(1, 2)


WRITTEN = {  # each with whether it may count what scores are where keys are not seen
    subtracted: False,
    times_mask: False,
    two_masks: True,
    of_logarithms: False,
    of_log_softmax: False,
    exponentials_masked: False,
    softmax_where: False,
    a_little_more: False,
    by_distance: False,
    groups_merged: False,
    heads_merged: False,
}
