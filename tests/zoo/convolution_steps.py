"""Convolutions: residual blocks, a small U-Net, and Equinox layers one example at a time."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from .parts import BATCH, Draw, adam, cross_entropy, descend
from .registry import Call, step

LAYOUT = ("NHWC", "HWIO", "NHWC")


def conv(x: jax.Array, w: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT, feature_group_count=groups
    )


def group_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises each example over space and over groups of eight channels."""
    groups = x.reshape(*x.shape[:3], -1, 8)
    return jax.nn.standardize(groups, axis=(1, 2, 4), epsilon=1e-5).reshape(x.shape) * scale


@jax.jit
def residual_step(params, batch):
    def loss_fn(p):
        x = conv(batch["image"], p["stem"], stride=2)
        for block in p["blocks"]:
            h = jax.nn.gelu(group_norm(x, block["norm"]))
            h = conv(conv(h, block["depthwise"], groups=h.shape[-1]), block["expand"])
            x = x + conv(jax.nn.gelu(h), block["reduce"])
        return cross_entropy(jnp.mean(x, axis=(1, 2)) @ p["head"], batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return descend(params, grads), loss


@step(
    "plain cnn",
    batch={"batch.image": 0, "batch.label": 0},
    roles={"params": "params", "batch": "batch"},
    feeds={"params": 0},
    notes="depthwise convolutions and 1 by 1 ones",
)
def residual_network(seed: int = 0) -> Call:
    d, width = Draw(seed), 64
    blocks = [
        {"norm": jnp.ones(width), "depthwise": d.weight(3, 3, 1, width)}
        | {"expand": d.weight(1, 1, width, 256), "reduce": d.weight(1, 1, 256, width)}
        for _ in range(2)
    ]
    params = {"stem": d.weight(3, 3, 3, width), "blocks": blocks, "head": d.weight(width, 32)}
    return Call(residual_step, (params, {"image": d.normal(BATCH, 8, 8, 3), "label": d.ids(32, BATCH)}))


@jax.jit
def denoise_step(params, opt_state, key, clean):
    """A small U-Net takes noise away again."""
    noisy = clean + 0.3 * jax.random.normal(key, clean.shape)

    def loss_fn(p):
        wide = jax.nn.gelu(conv(noisy, p["in"]))
        deep = jax.nn.gelu(conv(wide, p["down"], stride=2))
        up = jax.lax.conv_transpose(deep, p["up"], (2, 2), "SAME", dimension_numbers=LAYOUT)
        joined = jnp.concatenate([wide, jax.nn.gelu(up)], axis=-1)
        return jnp.mean((conv(joined, p["out"]) - clean) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = adam.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


@step(
    "plain cnn rng",
    batch={"clean": 0},
    roles={"params": "params", "opt_state": "optimizer", "key": "rng", "clean": "batch"},
    feeds={"params": 0, "opt_state": 1},
)
def u_net(seed: int = 0) -> Call:
    d = Draw(seed)
    shapes = {"in": (3, 3, 1, 32), "down": (3, 3, 32, 64), "up": (3, 3, 64, 32), "out": (3, 3, 64, 1)}
    params = {name: d.weight(*shape) for name, shape in shapes.items()}
    return Call(denoise_step, (params, adam.init(params), jax.random.key(seed), d.normal(BATCH, 8, 8, 1)))


class Classifier(eqx.Module):
    """One image, channels first; functions stand among the layers."""

    layers: list[Any]

    def __init__(self, key: jax.Array):
        first, second, head = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(3, 32, 3, padding=1, key=first),
            jax.nn.gelu,
            eqx.nn.AvgPool2d(2, 2),
            eqx.nn.Conv2d(32, 64, 3, padding=1, key=second),
            jnp.tanh,
            jnp.ravel,
            eqx.nn.Linear(64 * 16, 32, key=head),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def trainer(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A jitted step around a loss, as a loop's setup would make it."""

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        value, grads = eqx.filter_value_and_grad(loss)(model, x, y)
        updates, opt_state = adam.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, value

    return make_step


@trainer
def classifier_step(model, x, y):
    scores = jax.vmap(model)(x)
    return -jnp.mean(jnp.take_along_axis(scores, y[:, None], axis=1))


@step(
    "equinox cnn",
    batch={"x": 0, "y": 0},
    roles={"model": "params", "opt_state": "optimizer", "x": "batch", "y": "batch"},
    feeds={"model": 0, "opt_state": 1},
)
def equinox_cnn(seed: int = 0) -> Call:
    d, model = Draw(seed), Classifier(jax.random.key(seed))
    opt_state = adam.init(eqx.filter(model, eqx.is_array))
    return Call(classifier_step, (model, opt_state, d.normal(BATCH, 3, 8, 8), d.ids(32, BATCH)))
