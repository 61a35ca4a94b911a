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
    return jax.nn.dot_product_attention(
        q, k, v, mask=None if mask is None else jnp.broadcast_to(mask, mask.shape)
    )


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


FORMS = {
    f.__name__: f
    for f in (by_hand, einsum, divided_later, added, of_jax, of_nnx, of_linen, grouped, repeated)
}
