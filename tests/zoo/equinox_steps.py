"""Equinox steps: models are pytrees that hold functions beside arrays."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from .parts import BATCH, Draw, adam, cross_entropy
from .registry import Call, step

XY: dict[str, Any] = {
    "batch": {"x": 0, "y": 0},
    "roles": {"model": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"},
    "feeds": {"model": 0, "opt_state": 1},
}


class Net(eqx.Module):
    """One example in, one out; the activation is a leaf that is no array."""

    layers: list[eqx.nn.Linear]
    activation: Callable
    scale: float = eqx.field(static=True)

    def __init__(self, key: jax.Array):
        inner, head = jax.random.split(key)
        self.layers = [eqx.nn.Linear(64, 256, key=inner), eqx.nn.Linear(256, 32, key=head)]
        self.activation, self.scale = jax.nn.gelu, 0.5

    def __call__(self, x):
        return self.layers[1](self.activation(self.layers[0](x))) * self.scale


@eqx.filter_jit
def filter_step(model, opt_state, x, y):
    loss, grads = eqx.filter_value_and_grad(lambda m: cross_entropy(jax.vmap(m)(x), y))(model)
    updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


@step("equinox", **XY)
def equinox_filter_jit(seed: int = 0) -> Call:
    model, d = Net(jax.random.key(seed)), Draw(seed)
    opt_state = adam.init(eqx.filter(model, eqx.is_array))
    return Call(filter_step, (model, opt_state, d.normal(BATCH, 64), d.ids(32, BATCH)))


class NormNet(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        inner, head = jax.random.split(key)
        self.inner = eqx.nn.Linear(64, 256, use_bias=False, key=inner)
        self.norm = eqx.nn.BatchNorm(256, axis_name="examples", mode="batch")
        self.head = eqx.nn.Linear(256, 32, key=head)

    def __call__(self, x, state):
        x, state = self.norm(self.inner(x), state)
        return self.head(jax.nn.gelu(x)), state


@eqx.filter_jit
def norm_step(model, state, opt_state, x, y):
    def loss_fn(m, s):
        logits, s = jax.vmap(m, axis_name="examples", in_axes=(0, None), out_axes=(0, None))(x, s)
        return cross_entropy(logits, y), s

    (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state)
    updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


@step(
    "equinox",
    batch=XY["batch"],
    roles=XY["roles"] | {"state": "other"},
    feeds={"model": 0, "state": 1, "opt_state": 2},
    notes="eqx.nn.State with BatchNorm over the vmapped axis",
)
def equinox_batch_norm(seed: int = 0) -> Call:
    model, state = eqx.nn.make_with_state(NormNet)(jax.random.key(seed))
    d = Draw(seed)
    opt_state = adam.init(eqx.filter(model, eqx.is_inexact_array))
    return Call(norm_step, (model, state, opt_state, d.normal(BATCH, 64), d.ids(32, BATCH)))


def noisy_loss(model, x, y, key):
    hidden = eqx.nn.Dropout(0.1)(x, key=key)
    return jnp.mean((model(hidden) - y) ** 2)


@eqx.filter_value_and_grad
def mean_loss(model, batch, keys):
    x, y = batch
    return jnp.mean(jax.vmap(noisy_loss, in_axes=(None, 0, 0, 0))(model, x, y, keys))


@eqx.filter_jit(donate="none")
def keyed_step(model, batch, key, *, lr):
    loss, grads = mean_loss(model, batch, jax.random.split(key, BATCH))
    model = eqx.apply_updates(model, jax.tree.map(lambda g: -lr * g, grads))
    return loss, model


@step(
    "equinox rng",
    batch={"batch.0": 0, "batch.1": 0},
    roles={"model": "params", "batch": "batch", "key": "rng", "lr": "other"},
    feeds={"model": 1},
    notes="a key for each example, split inside; the learning rate is a Python number and so static here",
)
def equinox_key_per_example(seed: int = 0) -> Call:
    model = eqx.nn.MLP(64, 32, 128, depth=2, activation=jnp.tanh, key=jax.random.key(seed))
    d = Draw(seed)
    batch = (d.normal(BATCH, 64), d.normal(BATCH, 32))
    return Call(keyed_step, (model, batch, jax.random.key(seed + 1)), {"lr": 0.1})


@eqx.filter_jit
def partitioned_step(weights, static, opt_state, batch):
    def loss_fn(w):
        model = eqx.combine(w, static)
        return cross_entropy(jax.vmap(model)(batch["x"]), batch["y"])

    loss, grads = jax.value_and_grad(loss_fn)(weights)
    updates, opt_state = adam.update(grads, opt_state, weights)
    return eqx.apply_updates(weights, updates), opt_state, loss


@step(
    "equinox",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"weights": "params", "opt_state": "optimizer", "batch": "batch"},
    feeds={"weights": 0, "opt_state": 1},
    notes="eqx.partition outside, eqx.combine inside; one argument holds no array at all",
)
def equinox_partition(seed: int = 0) -> Call:
    weights, static = eqx.partition(Net(jax.random.key(seed)), eqx.is_inexact_array)
    d = Draw(seed)
    batch = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}
    return Call(partitioned_step, (weights, static, adam.init(weights), batch))
