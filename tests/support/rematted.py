"""Losses to be computed again in their backward pass, and what they keep for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxshard_magic.gradients.remat import RematLoss, remat
from jaxshard_magic.program.ir import Program
from jaxshard_magic.program.primitives import is_literal
from jaxshard_magic.program.sizes import nbytes

ROWS, WIDTH, LAYERS = 64, 32, 8
ARRAY = 4 * ROWS * WIDTH  # bytes of one layer's activations
LENGTH, HEADS, MODEL, WORDS = 8, 2, 16, 11


def flat(loss: Callable, *args: Any) -> tuple[ClosedJaxpr, list]:
    """A loss, or a loss and more, as a jaxpr of flat arrays; and the arrays."""
    leaves, tree = jax.tree.flatten(args)
    return jax.make_jaxpr(lambda *xs: jax.tree.leaves(loss(*jax.tree.unflatten(tree, xs))))(*leaves), leaves


def gradients(closed: ClosedJaxpr) -> Callable:
    """`(loss, gradients, everything else)` of flat arrays."""
    wrt = [k for k, a in enumerate(closed.in_avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def run(*xs: Any) -> tuple[tuple[jax.Array, list], list]:
        outs = jaxpr_as_fun(closed)(*xs)
        return outs[0], outs[1:]

    return jax.value_and_grad(run, argnums=wrt, has_aux=True)


def same(closed: ClosedJaxpr, how: str, leaves: list) -> RematLoss:
    """What remat makes of a loss, once its value, outputs and gradients are found to be those of the loss."""
    found = remat(closed, how)
    assert [str(a) for a in found.closed.in_avals] == [str(a) for a in closed.in_avals]
    assert [str(a) for a in found.closed.out_avals] == [str(a) for a in closed.out_avals]
    assert not found.closed.consts
    want, got = (jax.tree.leaves(jax.jit(gradients(c))(*leaves)) for c in (closed, found.closed))
    largest = max(jnp.abs(a).max() for a in want)
    assert all(jnp.allclose(a, b, rtol=1e-5, atol=1e-6 * largest) for a, b in zip(want, got, strict=True))
    return found


def kept(closed: ClosedJaxpr) -> int:
    """Bytes that the forward pass hands the backward pass besides the inputs of the loss."""
    wrt = [k for k, a in enumerate(closed.in_avals) if jnp.issubdtype(a.dtype, jnp.floating)]

    def run(*xs: Any) -> list:
        def loss(*ys: Any) -> Any:
            return jaxpr_as_fun(closed)(*(dict(enumerate(xs)) | dict(zip(wrt, ys, strict=True))).values())[0]

        return jax.tree.leaves(jax.vjp(loss, *(xs[k] for k in wrt))[1])

    jaxpr = jax.make_jaxpr(run)(*closed.in_avals).jaxpr
    return sum(nbytes(v.aval) for v in {v for v in jaxpr.outvars if not is_literal(v)} - set(jaxpr.invars))


def products(closed: ClosedJaxpr) -> int:
    """The matmuls of a loss and its gradients, trips of loops multiplied in."""
    jaxpr = jax.make_jaxpr(gradients(closed))(*closed.in_avals)
    return sum(e.trip_count for e in Program(jaxpr).equations if e.name == "dot_general")


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sin(x @ w)


def chain(ws: list, x: jax.Array) -> jax.Array:
    """Of each layer the cosine is kept, and its input, which for the first is the loss's."""
    for w in ws:
        x = layer(w, x)
    return x.sum()


def looped(ws: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0].sum()


def weights(key: int = 0) -> list:
    keys = jax.random.split(jax.random.key(key), LAYERS)
    return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys]


X = jax.random.normal(jax.random.key(9), (ROWS, WIDTH))


def norm(x: jax.Array) -> jax.Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: dict, x: jax.Array) -> jax.Array:
    """Six matmuls."""
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, p[name]) for name in "qkv")
    scores = checkpoint_name(jnp.einsum("bqhe,bkhe->bhqk", q, k), "scores")
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores), v)
    return jnp.einsum("bqhe,hed->bqd", mixed, p["o"])


@jax.jit
def mlp(p: dict, x: jax.Array) -> jax.Array:
    """Two matmuls."""
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def block(p: dict, x: jax.Array, key: jax.Array) -> jax.Array:
    x = x + attention(p, norm(x))
    x = x + mlp(p, norm(x))
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def head(embed: jax.Array, x: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits = norm(x) @ embed.T
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), words[..., None], -1)
    return -found.mean(), (logits.argmax(-1) == words).sum()


def unrolled(p: dict, words: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    x = p["embed"][words]
    for p_block, k in zip(p["blocks"], jax.random.split(key, len(p["blocks"])), strict=True):
        x = block(p_block, x, k)
    return head(p["embed"], x, words)


def scanned(p: dict, words: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(key, len(p["blocks"]["up"]))
    x, _ = lax.scan(lambda x, given: (block(given[0], x, given[1]), None), p["embed"][words], (p["blocks"], keys))
    return head(p["embed"], x, words)


def transformer(loss: Callable, blocks: int = 2) -> tuple[ClosedJaxpr, list]:
    keys = iter(jax.random.split(jax.random.key(0), 7 * blocks + 2))
    each = MODEL // HEADS
    shapes = dict.fromkeys("qkv", (MODEL, HEADS, each)) | {"o": (HEADS, each, MODEL)}
    shapes |= {"up": (MODEL, 4 * MODEL), "down": (4 * MODEL, MODEL)}

    def one() -> dict:
        return {name: 0.25 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}

    found: Any = [one() for _ in range(blocks)]
    if loss is scanned:
        found = jax.tree.map(lambda *ws: jnp.stack(ws), *found)
    params = {"blocks": found, "embed": jax.random.normal(next(keys), (WORDS, MODEL))}
    words = jax.random.randint(next(keys), (4, LENGTH), 0, WORDS)
    return flat(loss, params, words, jax.random.key(3))
