"""Models with layers for as many stages as are asked for, each with its train step, to be trained as pipelines.

A step is called as `*state, loss = step(*state, x, y)`. All is smooth: at the kink of a relu rounding may turn into
another gradient, and five steps later into other weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.pipelined_steps import adam, normal

WIDTH, VOCABULARY, LENGTH, HEADS = 128, 128, 4, 4  # fsdp divides arrays from 128 x 128 on
Step = Callable[..., Any]
Batch = tuple[jax.Array, jax.Array]
Trained = tuple[Step, Sequence[Any]]  # a step, and its state before the first


@dataclass(frozen=True)
class Kind:
    """One kind of model.

    `make(parts)`: its step and state, with layers enough to be cut into so many parts, `most` at most.
    `batch(seed, examples)`: x and y. `by_hand(parts, microbatches, shards)`: the step as a loop over microbatches,
    where its loss couples examples.
    """

    make: Callable[[int], Trained]
    batch: Callable[[int, int], Batch]
    most: int
    by_hand: Callable[[int, int, int], Step] | None = None


def step_of(loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Step:
    """The step that everybody writes, for `loss(params, key, x, y)`."""

    def step(params, state, key, x, y):
        key, own = jax.random.split(key)
        value, grads = jax.value_and_grad(loss)(params, own, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key, value

    return step


def trained(params: Any, loss: Callable[..., jax.Array], optimizer: optax.GradientTransformation) -> Trained:
    return step_of(loss, optimizer), (params, optimizer.init(params), jax.random.key(7))


def cross_entropy(scores: jax.Array, y: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores, y).mean()


def sentences(seed: int, examples: int) -> Batch:
    x, y = jax.random.split(jax.random.key(seed))
    shape = (examples, LENGTH)
    return jax.random.randint(x, shape, 0, VOCABULARY), jax.random.randint(y, shape, 0, VOCABULARY)


def vectors(*shape: int) -> Callable[[int, int], Batch]:
    def batch(seed, examples):
        x, y = jax.random.split(jax.random.key(seed))
        return jax.random.normal(x, (examples, *shape)), jax.random.randint(y, (examples,), 0, 10)

    return batch


def mlp(_parts: int) -> Trained:
    sizes = (784, 512, 256, 10)
    params = [{"w": normal(i, a, b, scale=a**-0.5), "b": jnp.zeros(b)} for i, (a, b) in enumerate(pairwise(sizes))]

    def loss(params, key, x, y):
        for p in params[:-1]:
            x = jax.nn.silu(x @ p["w"] + p["b"])
        return cross_entropy(x @ params[-1]["w"] + params[-1]["b"], y)

    return trained(params, loss, optax.sgd(0.1, momentum=0.9))


def normed(h: jax.Array) -> jax.Array:
    return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-5)


def attention(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    q, k, v = ((h @ w[name]).reshape(*h.shape[:2], HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (HEADS / WIDTH) ** 0.5
    seen = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(h.shape) @ w["o"]


def layer(h: jax.Array, w: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    h = h + attention(normed(h), w)
    made = jax.nn.gelu(normed(h) @ w["up"]) @ w["down"]
    return h + jnp.where(jax.random.bernoulli(key, 0.9, made.shape), made / 0.9, 0)


def transformer_params(layers: int, *, head: bool = True) -> dict[str, Any]:
    square, scale = dict.fromkeys("qkvo", (WIDTH, WIDTH)), 0.5 * WIDTH**-0.5
    shapes = square | {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    stack = {k: normal(i, layers, *s, scale=scale) for i, (k, s) in enumerate(shapes.items())}
    ends = {"embedding": normal(20, VOCABULARY, WIDTH, scale=0.2)}
    ends |= {"head": normal(21, WIDTH, VOCABULARY, scale=scale)} if head else {}
    return {"layers": stack, **ends}


def unstacked(params: dict[str, Any]) -> dict[str, Any]:
    stack = params["layers"]
    n = len(stack["q"])
    return params | {"layers": [{k: w[i] for k, w in stack.items()} for i in range(n)]}


def transformed(params: dict[str, Any], key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The loss of a language model with dropout: a loop over its layers where they are stacked, and its embedding for a
    head where it has none."""
    h, stack = params["embedding"][x], params["layers"]
    if isinstance(stack, list):
        for w, own in zip(stack, jax.random.split(key, len(stack)), strict=True):
            h = layer(h, w, own)
    else:
        keys = jax.random.split(key, len(stack["q"]))
        h, _ = jax.lax.scan(lambda h, w: (layer(h, *w), None), h, (stack, keys))
    return cross_entropy(normed(h) @ params.get("head", params["embedding"].T), y)


def scanned(parts: int) -> Trained:
    return trained(transformer_params(max(4, parts)), transformed, adam())


def unrolled(parts: int) -> Trained:
    """Each layer has two halves to cut between."""
    return trained(unstacked(transformer_params(max(2, -(-parts // 2)))), transformed, adam())


def tied(parts: int) -> Trained:
    """Its gradients are clipped by the norm of all."""
    params = unstacked(transformer_params(max(2, -(-parts // 2)), head=False))
    return trained(params, transformed, optax.chain(optax.clip_by_global_norm(0.1), adam()))


class Convolutions(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = nn.Conv(64, (3, 3), strides=2 if i < 2 else 1, use_bias=False)(x)
            x = nn.silu(nn.BatchNorm(use_running_average=False)(x))
        return nn.Dense(10)(x.mean((1, 2)))


def image_gradients(parts: int) -> Callable[..., Any]:
    """`(params, statistics, x, y)` -> the loss with the new statistics, and gradients."""
    model = Convolutions(max(3, parts))

    def loss(params, stats, x, y):
        out, new = model.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
        return cross_entropy(out, y), new["batch_stats"]

    return jax.value_and_grad(loss, has_aux=True)


def convolutions(parts: int) -> Trained:
    variables = jax.jit(Convolutions(max(3, parts)).init)(jax.random.key(0), jnp.ones((2, 16, 16, 3)))
    gradients = image_gradients(parts)

    def step(params, stats, state, x, y):
        (value, stats), grads = gradients(params, stats, x, y)
        updates, state = adam().update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, value

    params, stats = variables["params"], variables["batch_stats"]
    return step, (params, stats, adam().init(params))


def convolutions_by_hand(parts: int, microbatches: int, shards: int) -> Step:
    """Statistics go on from one microbatch to the next, of which each has an equal part of what every shard holds."""
    gradients = image_gradients(parts)

    def step(params, stats, state, x, y):
        rows, found = np.arange(len(x)).reshape(shards, microbatches, -1), []
        for m in range(microbatches):
            mine = rows[:, m].ravel()
            (value, stats), grads = gradients(params, stats, x[mine], y[mine])
            found.append((value, grads))
        value, grads = jax.tree.map(lambda *each: sum(each) / microbatches, *found)
        updates, state = adam().update(grads, state, params)
        return optax.apply_updates(params, updates), stats, state, value

    return step


KINDS = {
    "mlp": Kind(mlp, vectors(784), 4),
    "unrolled": Kind(unrolled, sentences, 16),
    "scanned": Kind(scanned, sentences, 16),
    "tied": Kind(tied, sentences, 16),
    "batch-norm": Kind(convolutions, vectors(16, 16, 3), 8, convolutions_by_hand),
}
