"""A train step written for one device of many, its arguments with and without a device axis, and runs to compare."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax import lax

import jaxshard_magic
from jaxshard_magic.errors import ShardError

DEVICES, EXAMPLES, WIDTH, HIDDEN, CLASSES = 8, 32, 6, 16, 3


def data():
    keys = jax.random.split(jax.random.key(1), 2)
    return {
        "x": jax.random.normal(keys[0], (EXAMPLES, WIDTH)),
        "y": jax.random.normal(keys[1], (EXAMPLES, CLASSES)),
    }


def weights():
    keys = jax.random.split(jax.random.key(0), 2)
    w = {
        "in": 0.3 * jax.random.normal(keys[0], (WIDTH, HIDDEN)),
        "out": 0.3 * jax.random.normal(keys[1], (HIDDEN, CLASSES)),
    }
    return {"params": w, "momentum": jax.tree.map(jnp.zeros_like, w), "count": jnp.zeros((), jnp.int32)}


def mean_loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["in"]) @ params["out"] - batch["y"]) ** 2)


def updated(state, grads):
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum, "count": state["count"] + 1}


def step(state, batch):
    loss, grads = jax.value_and_grad(mean_loss)(state["params"], batch)
    grads = lax.pmean(grads, "batch")
    return updated(state, grads), lax.pmean(loss, "batch")


class Net(nn.Module):
    """`axis`: the devices that BatchNorm takes its statistics over, beside a device's own examples."""

    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False, momentum=0.5, axis_name=self.axis)
        x = norm(nn.Dense(HIDDEN)(x))
        return nn.Dense(CLASSES)(nn.relu(x))


class Statistics(TrainState):
    batch_stats: dict


def linen_state(axis=None, optimizer=None):
    variables = Net().init(jax.random.key(0), jnp.ones((2, WIDTH)))
    kept = {k: variables[k] for k in ("params", "batch_stats")}
    return Statistics.create(apply_fn=Net(axis).apply, tx=optimizer or optax.adam(1e-2), **kept)


def linen_loss(params, statistics, state, batch):
    out, new = state.apply_fn({"params": params, "batch_stats": statistics}, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]


def linen_step(state, batch, sync=False):
    gradient = jax.value_and_grad(linen_loss, has_aux=True)
    (value, statistics), grads = gradient(state.params, state.batch_stats, state, batch)
    grads = lax.pmean(grads, axis_name="batch")
    if sync:
        statistics = lax.pmean(statistics, "batch")
    return state.apply_gradients(grads=grads, batch_stats=statistics), {"loss": lax.pmean(value, "batch")}


def split(batch, *sizes):
    sizes = sizes or (DEVICES,)
    n = int(np.prod(sizes))
    return jax.tree.map(lambda x: x.reshape(*sizes, x.shape[0] // n, *x.shape[1:]), batch)


def replicate(tree, n=DEVICES):
    return jax.tree.map(lambda x: jnp.stack([x] * n), tree)


def whole():
    """The arguments of `step` without a device axis."""
    return weights(), data()


def stacked(n=DEVICES):
    """The arguments of `step` as `jax.pmap` takes them."""
    return replicate(weights(), n), split(data(), n)


def three(call, state, *rest):
    given = []
    for _ in range(3):
        state, other = call(state, *rest)
        given.append(other)
    return jax.tree.map(np.asarray, (state, given))


def same(got, want, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def first(tree):
    """What one device holds of arrays with a device axis."""
    return jax.tree.map(lambda x: x[0], tree)


def shard(fun, mesh="data=8", **options):
    return jaxshard_magic.shard(fun, "pmap", mesh=jaxshard_magic.mesh(mesh), **options)


def refused(fun, *args, mesh="data=8", **options):
    with pytest.raises(ShardError) as error:
        shard(fun, mesh, **options).prepare(*args)
    assert "\n" not in str(error.value)
    return error.value


def halves_on_model(state, batch):
    """Each device of `model` makes half of the hidden layer; the batch is divided over `data` alone."""

    def loss(params):
        i = lax.axis_index("model")
        cut = partial(lax.dynamic_slice_in_dim, start_index=i * HIDDEN // 2, slice_size=HIDDEN // 2)
        hidden = jnp.tanh(batch["x"] @ cut(params["in"], axis=1))
        out = lax.psum(hidden @ cut(params["out"], axis=0), "model")
        return jnp.mean((out - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    grads = jax.tree.map(lambda g: lax.psum(g, "model") / 2, grads)  # each psum's transpose sums again
    return updated(state, lax.pmean(grads, "data")), lax.pmean(value, "data")
