"""Steps on pytrees of arrays: what a state and a batch can be."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .parts import BATCH, Draw, cross_entropy, descend, mlp, mlp_params
from .registry import Call, step

SIZES = (64, 256, 32)
XY = {"params": "params", "x": "batch", "y": "batch"}


@jax.jit
def dict_step(params, batch):
    loss, grads = jax.value_and_grad(lambda p: cross_entropy(mlp(p, batch["x"]), batch["y"]))(params)
    return descend(params, grads), loss


@step(
    "plain",
    batch={"batch.x": 0, "batch.y": 0},
    roles={"params": "params", "batch": "batch"},
    feeds={"params": 0},
)
def dict_of_arrays(seed: int = 0) -> Call:
    d = Draw(seed)
    return Call(dict_step, (mlp_params(d, *SIZES), {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}))


def log_probabilities(params, x):
    *hidden, (w, b) = params
    for v, c in hidden:
        x = jnp.tanh(x @ v + c)
    return jax.nn.log_softmax(x @ w + b)


@jax.jit
def pairs_step(params, x, y):
    grads = jax.grad(lambda p: -jnp.mean(jnp.sum(log_probabilities(p, x) * y, axis=1)))(params)
    return [(w - 0.1 * dw, b - 0.1 * db) for (w, b), (dw, db) in zip(params, grads, strict=True)]


@step("plain", batch={"x": 0, "y": 0}, roles=XY, feeds={"params": ()})
def list_of_pairs(seed: int = 0) -> Call:
    """Three layers, one-hot labels in numpy; only the parameters come back."""
    d = Draw(seed)
    params = [(layer["w"], layer["b"]) for layer in mlp_params(d, 64, 256, 256, 32).values()]
    one_hot = np.eye(32, dtype=np.float32)[d.rng.integers(0, 32, BATCH)]
    return Call(pairs_step, (params, d.numpy(BATCH, 64), one_hot))


def gradients_step(params, x, y):
    return jax.grad(lambda p: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2))(params)


@step("plain", batch={"x": 0, "y": 0}, roles=XY)
def gradients_only(seed: int = 0) -> Call:
    """Not jitted, and no update: the gradients are all that comes back."""
    d = Draw(seed)
    params = {"in": d.weight(64, 256), "out": d.weight(256, 32)}
    return Call(gradients_step, (params, d.normal(BATCH, 64), d.normal(BATCH, 32)))


@step(
    "plain",
    batch={"closure.0": 0, "closure.1": 0},
    roles={"params": "params", "closure": "batch"},
    feeds={"params": 0},
)
def closed_over_data(seed: int = 0) -> Call:
    d = Draw(seed)
    x, y = d.normal(BATCH, 64), d.normal(BATCH, 32)

    @jax.jit
    def train_step(params):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - y) ** 2))(params)
        return descend(params, grads), loss

    return Call(train_step, (mlp_params(d, *SIZES),))


@jax.jit
def columns_step(params, x, y):
    def loss_fn(p):
        return jnp.mean((p["out"] @ jnp.tanh(p["in"] @ x + p["bias"][:, None]) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step("plain", batch={"x": 1, "y": 1}, roles=XY, feeds={"params": 0})
def features_first(seed: int = 0) -> Call:
    """Examples are columns; weights multiply from the left."""
    d = Draw(seed)
    params = {"in": d.weight(64, 256).T, "bias": jnp.zeros(256), "out": d.weight(256, 32).T}
    return Call(columns_step, (params, d.normal(64, BATCH), d.normal(32, BATCH)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sentences:
    """Token ids padded to one length, (batch, time), and where they are real."""

    ids: jax.Array
    mask: np.ndarray
    labels: jax.Array


@jax.jit
def masked_step(params, batch):
    def loss_fn(p):
        logits = mlp(p["net"], p["embed"][batch.ids])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain",
    batch={"batch.ids": 0, "batch.mask": 0, "batch.labels": 0},
    roles={"params": "params", "batch": "batch"},
    feeds={"params": 0},
    notes="a registered dataclass; the loss is divided by what the mask lets through",
)
def masked_loss_dataclass(seed: int = 0) -> Call:
    d, time = Draw(seed), 12
    params = {"embed": d.normal(128, 64), "net": mlp_params(d, 64, 256, 128)}
    mask = np.arange(time) < d.rng.integers(1, time, (BATCH, 1))
    return Call(masked_step, (params, Sentences(d.ids(128, BATCH, time), mask, d.ids(128, BATCH, time))))


@jax.jit
def weighted_step(params, class_weight, batch):
    def loss_fn(p):
        targets = optax.smooth_labels(jax.nn.one_hot(batch["y"], 32), 0.1) * class_weight
        losses = optax.softmax_cross_entropy(mlp(p, batch["x"]), targets)
        return jnp.average(losses, weights=batch["weight"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain",
    batch={"batch.x": 0, "batch.y": 0, "batch.weight": 0},
    roles={"params": "params", "class_weight": None, "batch": "batch"},
    feeds={"params": 0},
)
def smoothed_and_weighted(seed: int = 0) -> Call:
    """Label smoothing, a weight for each example, a weight for each class."""
    d = Draw(seed)
    batch = {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH), "weight": jnp.abs(d.normal(BATCH))}
    return Call(weighted_step, (mlp_params(d, *SIZES), 1 + jnp.abs(d.normal(32)), batch))
