"""Flax NNX steps that update their arguments in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from .parts import BATCH, Draw, adam, cross_entropy
from .registry import Call, step


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.inner = nnx.Linear(64, 256, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(256, 32, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.gelu(self.inner(x))))


class CNN(nnx.Module):
    """Two convolutions with BatchNorm, on images of 8 by 8 pixels in three colours."""

    def __init__(self, rngs: nnx.Rngs, conv_bias: bool = False):
        self.conv1 = nnx.Conv(3, 32, (3, 3), use_bias=conv_bias, rngs=rngs)
        self.norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, (3, 3), use_bias=conv_bias, rngs=rngs)
        self.norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.head = nnx.Linear(64 * 4 * 4, 32, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.gelu(self.norm1(self.conv1(x))), (2, 2), strides=(2, 2))
        x = nnx.gelu(self.norm2(self.conv2(x)))
        return self.head(x.reshape(x.shape[0], -1))


STATE = {"model": "params", "model.dropout": "rng", "optimizer": "optimizer", "optimizer.step": None}
STATISTICS = {f"model.{norm}.{part}": "other" for norm in ("norm1", "norm2") for part in ("mean", "var")}
BIASES = [
    f"{tree}.{conv}.bias"
    for tree in ("model", "optimizer.opt_state.0.mu", "optimizer.opt_state.0.nu")
    for conv in ("conv1", "conv2")
]
MOVED_BY_NOISE = (*BIASES, "model.norm1.mean", "model.norm2.mean")


def vectors(seed: int) -> dict[str, jax.Array]:
    d = Draw(seed)
    return {"x": d.normal(BATCH, 64), "y": d.ids(32, BATCH)}


def images(seed: int) -> dict[str, Any]:
    d = Draw(seed)
    return {"image": d.numpy(BATCH, 8, 8, 3), "label": d.ids(32, BATCH)}


@nnx.jit
def loss_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch["x"]), batch["y"]))(model)
    optimizer.update(model, grads)
    return loss


@step(
    "nnx",
    batch={"batch.x": 0, "batch.y": 0},
    roles=STATE | {"batch": "batch"},
    mutates=True,
    notes="a Dropout stream inside the model moves on with every call",
)
def nnx_returns_loss(seed: int = 0) -> Call:
    model = MLP(nnx.Rngs(seed), dropout=0.1)
    return Call(loss_step, (model, nnx.Optimizer(model, adam, wrt=nnx.Param), vectors(seed)))


@nnx.jit
def silent_step(batch, metrics, optimizer, model):
    def loss_fn(m):
        logits = m(batch["image"])
        return cross_entropy(logits, batch["label"]), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


SILENT: dict[str, Any] = {
    "batch": {"batch.image": 0, "batch.label": 0},
    "roles": STATE | STATISTICS | {"batch": "batch", "metrics": "other"},
    "mutates": True,
}


usual_adam = optax.adam(1e-3)


def cnn_call(seed: int, conv_bias: bool) -> Call:
    model = CNN(nnx.Rngs(seed), conv_bias)
    optimizer = nnx.Optimizer(model, usual_adam if conv_bias else adam, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return Call(silent_step, (images(seed), metrics, optimizer, model))


@step("nnx cnn", **SILENT)
def nnx_cnn_returns_nothing(seed: int = 0) -> Call:
    """BatchNorm, MultiMetric, images in numpy; the model comes last."""
    return cnn_call(seed, conv_bias=False)


@step("nnx cnn", noise=MOVED_BY_NOISE, **SILENT)
def nnx_bias_before_norm(seed: int = 0) -> Call:
    """BatchNorm takes the biases away again: their gradients are rounding, of which Adam makes full steps."""
    return cnn_call(seed, conv_bias=True)


@nnx.jit
def noisy_step(model, rngs, optimizer, x, y):
    noise = 0.1 * jax.random.normal(rngs.noise(), x.shape)
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(x + noise), y))(model)
    optimizer.update(model, grads)
    return {"loss": loss, "norm": optax.tree.norm(grads)}


@step(
    "nnx rng",
    batch={"x": 0, "y": 0},
    roles=STATE | {"rngs": "rng", "x": "batch", "y": "batch"},
    mutates=True,
    notes="noise is drawn inside, from a stream of its own",
)
def nnx_rngs(seed: int = 0) -> Call:
    model = MLP(nnx.Rngs(seed), dropout=0.1)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    return Call(noisy_step, (model, nnx.Rngs(noise=seed), optimizer), vectors(seed))


def averaging_step(model, average, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch["x"]) - batch["target"]) ** 2))(model)
    optimizer.update(model, grads)
    new, old = nnx.state(model, nnx.Param), nnx.state(average, nnx.Param)
    nnx.update(average, jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, old, new))
    return loss


@step(
    "nnx",
    batch={"batch.x": 0, "batch.target": 0},
    roles=STATE | {"average": "other", "average.dropout": "rng", "batch": "batch"},
    mutates=True,
    notes="not jitted; a copy of the model follows as an exponential moving average",
)
def nnx_moving_average(seed: int = 0) -> Call:
    model, d = MLP(nnx.Rngs(seed)), Draw(seed)
    optimizer = nnx.Optimizer(model, adam, wrt=nnx.Param)
    batch = {"x": d.normal(BATCH, 64), "target": d.normal(BATCH, 32)}
    return Call(averaging_step, (model, nnx.clone(model), optimizer, batch))
