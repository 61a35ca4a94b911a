"""States and results with leaves that are not float arrays, and steps cut in an unusual place."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 256, 32)
momentum = optax.sgd(0.1, momentum=0.9)


@jax.jit
def spectral_step(params, seen, batch):
    """Mixes along the grid by complex weights on its frequencies; counts how often each label was seen."""

    def loss_fn(p):
        x = jnp.tanh(batch["grid"] @ p["lift"])
        modes = jnp.fft.rfft(x, axis=1)[:, :8]
        x = x + jnp.fft.irfft(jnp.einsum("bmi,mio->bmo", modes, p["modes"]), n=x.shape[1], axis=1)
        return cross_entropy(jnp.mean(jnp.tanh(x), axis=1) @ p["head"], batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * jnp.conj(g), params, grads)
    return params, seen.at[batch["label"]].add(1), loss


@step(
    "plain",
    batch={"batch.grid": 0, "batch.label": 0},
    roles={"params": "params", "seen": "other", "batch": "batch"},
    feeds={"params": 0, "seen": 1},
    notes="a complex weight, an integer count by label, a Fourier transform",
)
def complex_and_integer_leaves(seed: int = 0) -> Call:
    d, width = Draw(seed), 64
    modes = (d.normal(8, width, width) + 1j * d.normal(8, width, width)) / width
    params = {"lift": d.weight(3, width), "modes": modes, "head": d.weight(width, 32)}
    batch = {"grid": d.normal(BATCH, 24, 3), "label": d.ids(32, BATCH)}
    return Call(spectral_step, (params, jnp.zeros(32, jnp.int32), batch))


class Training(NamedTuple):
    params: Any
    opt_state: Any
    key: jax.Array
    epoch: int


@jax.jit
def tuple_step(training, batch):
    key, noise = jax.random.split(training.key)

    x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)

    def loss_fn(p):
        return cross_entropy(mlp(p, x), batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(training.params)
    updates, opt_state = adam.update(grads, training.opt_state)
    params = optax.apply_updates(training.params, updates)
    return Training(params, opt_state, key, training.epoch + 1), {"loss": loss, "lr": 1e-3, "examples": BATCH}


@step(
    "plain optax rng",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"training.params": "params", "training.opt_state": "optimizer", "training.key": "rng"}
    | {"training.epoch": "other", "batch": "batch"},
    feeds={"training": 0},
    notes="a NamedTuple with an old key and a Python int; Python numbers in the result",
)
def named_tuple_state(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    training = Training(params, adam.init(params), jax.random.PRNGKey(seed), 0)
    return Call(tuple_step, (training, {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}))


@jax.jit
def loss_and_gradients(params, x, y):
    return jax.value_and_grad(lambda p: cross_entropy(mlp(p, x), y))(params)


def outside_step(params, opt_state, x, y):
    loss, grads = loss_and_gradients(params, x, y)
    updates, opt_state = momentum.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain optax",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="only the gradient is jitted, and it ran before",
)
def update_outside_jit(seed: int = 0) -> Call:
    d = Draw(seed)
    params, x, y = mlp_params(d, *SIZES), d.normal(BATCH, 64), d.ids(32, BATCH)
    loss_and_gradients(params, x, y)
    return Call(outside_step, (params, momentum.init(params), x, y))


@jax.custom_vjp
def nearest(codes, book):
    distance = jnp.sum((codes[:, None] - book) ** 2, axis=-1)
    return book[jnp.argmin(distance, axis=-1)]


nearest.defvjp(lambda codes, book: (nearest(codes, book), book), lambda book, g: (g, jnp.zeros_like(book)))


@jax.jit
def codebook_step(params, book, x):
    """Vector quantisation: gradients pass straight through the lookup, the book follows the codes."""

    def loss_fn(p):
        codes = mlp(p["encoder"], x)
        return jnp.mean((mlp(p["decoder"], nearest(codes, book)) - x) ** 2), codes

    (loss, codes), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    chosen = jax.nn.one_hot(jnp.argmin(jnp.sum((codes[:, None] - book) ** 2, axis=-1), axis=-1), len(book))
    means = chosen.T @ codes / jnp.maximum(chosen.sum(0), 1)[:, None]
    book = jnp.where(chosen.sum(0)[:, None] > 0, 0.9 * book + 0.1 * means, book)
    return descend(params, grads), book, loss


@step(
    "plain",
    batch={"x": 0},
    roles={"params": "params", "book": "other", "x": "batch"},
    feeds={"params": 0, "book": 1},
    notes="a custom gradient rule; a table that no gradient moves",
)
def vector_quantised(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"encoder": mlp_params(d, 64, 256, 16), "decoder": mlp_params(d, 16, 256, 64)}
    return Call(codebook_step, (params, d.normal(64, 16), d.normal(BATCH, 64)))
