"""Convolutions as public code has them: strided, transposed, dilated, grouped, one example at a time. Their gradients
are the plain step's on every mesh, and no window is divided."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import jaxshard_magic

LAYOUT = ("NHWC", "HWIO", "NHWC")
ON = {"dp": "data=8", "fsdp": "data=8", "tp": "data=4 model=2", "fsdp+tp": "data=2 fsdp=2 model=2"}


def array(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def descending(loss):
    """The step of a loss of parameters and a batch, with its gradients."""

    @jax.jit
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value, grads

    return step


class UNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        wide = nn.relu(nn.Conv(16, (3, 3))(x))
        deep = nn.relu(nn.Conv(32, (3, 3))(nn.max_pool(wide, (2, 2), (2, 2))))
        up = nn.relu(nn.ConvTranspose(16, (2, 2), (2, 2))(deep))
        return nn.Conv(2, (1, 1))(jnp.concatenate([wide, up], -1))


class Mobile(nn.Module):
    groups: int | None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3), (2, 2))(x))
        x = nn.relu(nn.Conv(32, (3, 3), feature_group_count=self.groups or 32, use_bias=False)(x))
        x = nn.relu(nn.Conv(64, (1, 1))(x))
        return nn.relu(nn.Conv(64, (4, 4), (2, 2), feature_group_count=self.groups or 64)(x))


class WaveNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for dilation in (1, 2, 4):
            h = nn.Conv(32, (2,), kernel_dilation=dilation, padding="CAUSAL")(x)
            x = nn.Conv(16, (1,))(jnp.tanh(h[..., :16]) * nn.sigmoid(h[..., 16:])) + (x if dilation > 1 else 0)
        return nn.Conv(16, (4,), kernel_dilation=2)(x)


def linen(model, x):
    params = jax.jit(model.init)(jax.random.key(0), x)
    y = array(*jax.eval_shape(model.apply, params, x).shape)
    return descending(lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2)), (params, x, y)


class Discriminator(eqx.Module):
    layers: list

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 4, 2, 1, use_bias=False, key=keys[0]),
            eqx.nn.PReLU(0.2),
            eqx.nn.Conv2d(16, 32, 4, 2, 1, use_bias=False, key=keys[1]),
            eqx.nn.BatchNorm(32, "batch", mode="ema"),
            eqx.nn.PReLU(0.2),
            eqx.nn.Conv2d(32, 1, 4, 1, 0, use_bias=False, key=keys[2]),
        ]

    def __call__(self, x, state):
        for layer in self.layers:
            x, state = layer(x, state) if isinstance(layer, eqx.nn.BatchNorm) else (layer(x), state)
        return x, state


def discriminator():
    model, state = eqx.nn.make_with_state(Discriminator)(jax.random.key(0))

    @eqx.filter_jit
    def step(model, state, x, y):
        def loss(model):
            out, after = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
            return optax.sigmoid_binary_cross_entropy(out.reshape(-1), y).mean(), after

        (value, after), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), after, value, grads

    return step, (model, state, array(8, 1, 16, 16), jnp.arange(8) % 2.0)


def small(params, x):
    x = jax.nn.relu(jax.lax.conv_general_dilated(x, params["in"], (2, 2), "SAME", dimension_numbers=LAYOUT))
    x = jax.lax.conv_transpose(x, params["up"], (2, 2), "SAME", dimension_numbers=LAYOUT)
    x = jax.lax.conv_general_dilated(
        jax.nn.relu(x), params["each"], (1, 1), "SAME", dimension_numbers=LAYOUT, feature_group_count=8
    )
    return x.mean((1, 2)) @ params["out"]


def small_params():
    shapes = {"in": (4, 4, 4, 16), "up": (2, 2, 16, 8), "each": (3, 3, 1, 8), "out": (8, 4)}
    return {name: 0.2 * array(*shape) for name, shape in shapes.items()}


def private():
    """The gradient of each example, clipped: the examples are groups of a convolution."""

    @jax.jit
    def step(params, x, y):
        def clipped(x, y):
            grads = jax.grad(lambda p: jnp.mean((small(p, x[None]) - y[None]) ** 2))(params)
            return jax.tree.map(lambda g: g / jnp.maximum(optax.tree.norm(grads), 0.1), grads)

        grads = jax.vmap(clipped)(x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g.mean(0), params, grads), grads

    return step, (small_params(), array(16, 8, 8, 4), array(16, 4))


def ensemble():
    """Several models on one batch: the models are groups of a convolution."""
    params = jax.tree.map(lambda p: p * jnp.linspace(0.5, 1.5, 4).reshape(-1, *[1] * p.ndim), small_params())
    step = descending(lambda p, x, y: jnp.mean((jax.vmap(small, (0, None))(p, x) - y) ** 2))
    return step, (params, array(16, 8, 8, 4), array(16, 4))


STEPS = {
    "transposed": lambda: linen(UNet(), array(8, 8, 8, 2)),
    "vmapped, with batch statistics": discriminator,
    "depthwise": lambda: linen(Mobile(None), array(8, 8, 8, 4)),
    "grouped": lambda: linen(Mobile(4), array(8, 8, 8, 4)),
    "dilated": lambda: linen(WaveNet(), array(8, 16, 8)),
    "one gradient an example": private,
    "one model a group": ensemble,
}
FAST = {
    ("vmapped, with batch statistics", "fsdp+tp"),
    ("one gradient an example", "dp"),
}


@cache
def plain(name):
    step, arguments = STEPS[name]()
    return jax.tree.leaves(step(*arguments))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [pytest.param(n, s, marks=() if (n, s) in FAST else pytest.mark.full) for n in STEPS for s in ON],
)
def test_gradients_are_the_plain_steps(name, strategy):
    step, arguments = STEPS[name]()
    sharded = jaxshard_magic.shard(step, strategy, mesh=jaxshard_magic.mesh(ON[strategy]))
    for got, want in zip(jax.tree.leaves(sharded(*arguments)), plain(name), strict=True):
        if eqx.is_inexact_array(want):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5 * float(jnp.abs(want).max()))


def test_groups_beside_a_mesh_axis_that_divides_none_of_them_train_alike():
    def step(p, image, words):
        def loss(p):
            made = jax.lax.conv_general_dilated(
                image @ p["into"],
                p["kernel"],
                (1, 1),
                "VALID",
                dimension_numbers=LAYOUT,
                feature_group_count=2,
            )
            return jnp.mean(jnp.sin(made)) + jnp.mean(jnp.tanh(jnp.tanh(words @ p["up"]) @ p["down"]))

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), value

    shapes = {"into": (2, 8), "kernel": (3, 1, 4, 4), "up": (4, 4), "down": (4, 16)}
    draw = [
        jax.random.normal(k, s)
        for k, s in zip(jax.random.split(jax.random.key(0)), [(16, 4, 4, 2), (16, 8, 4)], strict=True)
    ]
    params = {n: jax.random.normal(jax.random.key(len(n)), s) for n, s in shapes.items()}
    params, wanted = (
        jaxshard_magic.shard(step, "dp+sp", mesh="data=4 seq=2")(params, *draw)[0],
        step(params, *draw)[0],
    )
    for name, x in wanted.items():
        assert jnp.allclose(params[name], x, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize(
    ("strategy", "mesh", "spec", "window", "stride"),
    [
        ("dp", "data=4 rest=2", "P(None, 'data')", 1, 1),
        ("dp", "data=2 rest=4", "P('rest', 'data')", 1, 1),
        ("dp+sp", "data=4 seq=2", "P('data', 'seq')", 2, 2),
        ("dp+sp", "data=4 seq=2", "P('data', 'seq')", 3, 1),
        ("sp", "seq=2 rest=4", "P(None, 'seq')", 2, 2),
    ],
)
def test_groups_whose_window_lies_along_a_divided_dimension_train_alike(strategy, mesh, spec, window, stride):
    """Their gradient is added up over examples or positions of which several devices have the same."""

    def step(p, x):
        def loss(p):
            made = jax.lax.conv_general_dilated(
                jnp.tanh(x @ p["into"]),
                p["kernel"],
                (stride,),
                "SAME",
                dimension_numbers=("NHC", "HIO", "NHC"),
                feature_group_count=2,
            )
            return jnp.mean(jnp.sin(made))

        value, gradients = jax.value_and_grad(loss)(p)
        return jax.tree.map(lambda p, g: p - g, p, gradients), value

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "into": jax.random.normal(keys[0], (8, 8)),
        "kernel": jax.random.normal(keys[1], (window, 4, 4)),
    }
    x = jax.random.normal(keys[2], (8, 8, 8))
    got = jaxshard_magic.shard(step, strategy, mesh=mesh, specs={"x": spec})(params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, step(params, x))
