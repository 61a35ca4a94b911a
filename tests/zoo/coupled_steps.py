"""Losses in which the examples of a batch meet, and models whose weights are only looked up."""

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

momentum = optax.sgd(0.1, momentum=0.9)


def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


@jax.jit
def two_views_step(params, key, images):
    """Two noisy views of each image in one batch of twice the size; each looks for the other (SimCLR)."""
    first, second = jax.random.split(key)
    views = [images + 0.1 * jax.random.normal(k, images.shape) for k in (first, second)]

    def loss_fn(p):
        codes = unit(mlp(p, jnp.concatenate(views)))
        n = len(codes)
        alike = codes @ codes.T / 0.5 - 1e9 * jnp.eye(n)
        return cross_entropy(alike, jnp.roll(jnp.arange(n), n // 2))

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain rng contrastive",
    batch={"images": 0},
    roles={"params": "params", "key": "rng", "images": "batch"},
    feeds={"params": 0},
)
def contrastive_two_views(seed: int = 0) -> Call:
    d = Draw(seed)
    return Call(two_views_step, (mlp_params(d, 64, 256, 32), jax.random.key(seed), d.normal(BATCH, 64)))


@jax.jit
def two_towers_step(params, opt_state, batch):
    """Images and texts find each other within the batch (CLIP); the temperature is learned."""

    def loss_fn(p):
        image, text = unit(mlp(p["image"], batch["image"])), unit(mlp(p["text"], batch["text"]))
        logits = image @ text.T * jnp.exp(p["log_temperature"])
        own = jnp.arange(len(logits))
        return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = momentum.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain contrastive",
    batch={"batch.image": 0, "batch.text": 0},
    roles={"params": "params", "opt_state": "optimizer", "batch": "batch"},
    feeds={"params": 0, "opt_state": 1},
)
def contrastive_two_towers(seed: int = 0) -> Call:
    d = Draw(seed)
    towers = {"image": mlp_params(d, 64, 256, 32), "text": mlp_params(d, 48, 256, 32)}
    params = {**towers, "log_temperature": jnp.asarray(1.0)}
    batch = {"image": d.normal(BATCH, 64), "text": d.normal(BATCH, 48)}
    return Call(two_towers_step, (params, momentum.init(params), batch))


@jax.jit
def factors_step(params, ratings):
    def loss_fn(p):
        user, item = p["users"][ratings["user"]], p["items"][ratings["item"]]
        guess = jnp.sum(user * item, axis=-1) + p["bias"][ratings["item"]]
        return jnp.mean((guess - ratings["stars"]) ** 2) + 1e-3 * jnp.mean(user**2 + item**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain embedding",
    batch={"ratings.user": 0, "ratings.item": 0, "ratings.stars": 0},
    roles={"params": "params", "ratings": "batch"},
    feeds={"params": 0},
    notes="no product with a weight at all: two tables, looked up",
)
def matrix_factors(seed: int = 0) -> Call:
    d = Draw(seed)
    params = {"users": d.normal(512, 32), "items": d.normal(256, 64)[:, :32], "bias": jnp.zeros(256)}
    ratings = {"user": d.ids(512, BATCH), "item": d.ids(256, BATCH), "stars": d.normal(BATCH)}
    return Call(factors_step, (params, ratings))


@jax.jit
def equation_step(params, opt_state, inside, border):
    """A network u(x, t) that solves the heat equation: derivatives by its inputs, point by point."""

    def u(p, point):
        return mlp(p, point)[0]

    def residual(p, point):
        slope = jax.grad(u, argnums=1)
        _, second = jax.jvp(lambda q: slope(p, q), (point,), (jnp.array([1.0, 0.0]),))
        return slope(p, point)[1] - second[0]

    def loss_fn(p):
        inner = jax.vmap(residual, in_axes=(None, 0))(p, inside)
        outer = jax.vmap(u, in_axes=(None, 0))(p, border["point"]) - border["height"]
        return jnp.mean(inner**2) + jnp.mean(outer**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain",
    batch={"inside": 0, "border.point": 0, "border.height": 0},
    roles={"params": "params", "opt_state": "optimizer", "inside": "batch", "border": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="two batches, of 32 and 16 points",
)
def differential_equation(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, 2, 128, 128, 1)
    border = {"point": d.normal(BATCH, 2), "height": d.normal(BATCH)}
    return Call(equation_step, (params, adam.init(params), d.normal(2 * BATCH, 2), border))
