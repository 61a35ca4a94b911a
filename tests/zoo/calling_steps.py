"""Ways to call a step: keywords, Python numbers, static and donated arguments, partials, methods, keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 256, 32)


@jax.jit
def keyword_step(params, opt_state, *, x, y, lr=0.1, epoch=0):
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(mlp(p, x), y))(params)
    updates, opt_state = adam.update(grads, opt_state)
    updates = jax.tree.map(lambda u: u * lr * 0.5**epoch, updates)
    return {"params": optax.apply_updates(params, updates), "opt_state": opt_state, "loss": loss}


@step(
    "plain optax",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"}
    | {"lr": "other", "epoch": "other"},
    feeds={"params": "params", "opt_state": "opt_state"},
    notes="learning rate and epoch are Python numbers, the batch comes by keyword, the result is a dict",
)
def keywords_and_numbers(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    data = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}
    return Call(keyword_step, (params, adam.init(params)), {**data, "lr": 0.5, "epoch": 2})


@functools.partial(jax.jit, static_argnums=0, static_argnames="smooth", donate_argnums=(1, 2))
def donating_step(apply, params, opt_state, batch, smooth):
    x, y = batch
    targets = optax.smooth_labels(jax.nn.one_hot(y, 32), 0.1) if smooth else jax.nn.one_hot(y, 32)

    def loss_fn(p):
        return optax.softmax_cross_entropy(apply(p, x), targets).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain optax",
    batch={"batch.0": 0, "batch.1": 0},
    roles={"params": "params", "opt_state": "optimizer", "batch": "batch"},
    feeds={"params": 0, "opt_state": 1},
    notes="two static arguments, one by number and one by name; the state is donated",
)
def static_and_donated(seed: int = 0) -> Call:
    d = Draw(seed)
    params = mlp_params(d, *SIZES)
    args = (mlp, params, adam.init(params), (d.numpy(BATCH, 64), d.ids(32, BATCH)))
    return Call(donating_step, args, {"smooth": True})


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("microbatches",))
def accumulating_step(apply, params, x, y, *, microbatches):
    gradient = jax.value_and_grad(lambda p, x, y: cross_entropy(apply(p, x), y))

    def add(total, piece):
        loss, grads = gradient(params, *piece)
        return jax.tree.map(jnp.add, total, grads), loss

    pieces = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), (x, y))
    total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), pieces)
    return descend(params, total, 0.1 / microbatches), losses.mean()


@step(
    "plain",
    batch={"x": 0, "y": 0},
    roles={"params": "params", "x": "batch", "y": "batch"},
    feeds={"params": 0},
    notes="functools.partial binds a function and an int; gradients are accumulated by hand in a scan",
)
def partial_accumulation(seed: int = 0) -> Call:
    d = Draw(seed)
    bound = functools.partial(accumulating_step, mlp, microbatches=2)
    return Call(bound, (mlp_params(d, *SIZES), d.normal(BATCH, 64), d.ids(32, BATCH)))


class Trainer:
    """Keeps the optimizer; the state travels through `step`."""

    def __init__(self, tx: optax.GradientTransformation):
        self.tx = tx

    def loss(self, params, batch):
        return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params, opt_state, batch):
        loss, grads = jax.value_and_grad(self.loss)(params, batch)
        updates, opt_state = self.tx.update(grads, opt_state, params)
        metrics = {"loss": loss, "norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    def plain_step(self, params, opt_state, batch):
        return self.step(params, opt_state, batch)


momentum = optax.sgd(0.1, momentum=0.9)
TRAINER: dict[str, Any] = {
    "batch": {"batch.x": 0, "batch.y": 0},
    "roles": {"params": "params", "opt_state": "optimizer", "batch": "batch"},
    "feeds": {"params": 0, "opt_state": 1},
}


def trainer_call(seed: int, method: str) -> Call:
    d, trainer = Draw(seed), Trainer(momentum)
    params = mlp_params(d, *SIZES)
    batch = {"x": d.normal(BATCH, 64), "y": d.normal(BATCH, 32)}
    return Call(getattr(trainer, method), (params, momentum.init(params), batch))


@step("plain optax", **TRAINER)
def bound_method(seed: int = 0) -> Call:
    """A jitted method whose `self` is static."""
    return trainer_call(seed, "step")


@step("plain optax", **TRAINER)
def plain_method(seed: int = 0) -> Call:
    """A method that is not jitted itself and calls one that is."""
    return trainer_call(seed, "plain_step")


@jax.jit
def dropout_step(params, key, x, y):
    key, mask_key = jax.random.split(key)

    def loss_fn(p):
        h = jnp.tanh(x @ p["in"])
        h = jnp.where(jax.random.bernoulli(mask_key, 0.9, h.shape), h / 0.9, 0.0)
        return cross_entropy(h @ p["out"], y)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), key, loss


KEYED: dict[str, Any] = {
    "batch": {"x": 0, "y": 0},
    "roles": {"params": "params", "key": "rng", "x": "batch", "y": "batch"},
    "feeds": {"params": 0, "key": 1},
}


def dropout_call(seed: int, key: jax.Array) -> Call:
    d = Draw(seed)
    params = {"in": d.weight(64, 256), "out": d.weight(256, 32)}
    return Call(dropout_step, (params, key, d.normal(BATCH, 64), d.ids(32, BATCH)))


@step("plain rng", **KEYED)
def dropout_typed_key(seed: int = 0) -> Call:
    return dropout_call(seed, jax.random.key(seed))


@step("plain rng", **KEYED)
def dropout_old_key(seed: int = 0) -> Call:
    """The same with a key of two uint32."""
    return dropout_call(seed, jax.random.PRNGKey(seed))
