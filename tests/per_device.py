"""A train step written for one device of many, its arguments with and without a device axis, and runs to compare."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


def split(batch, *sizes):
    sizes = sizes or (DEVICES,)
    n = int(np.prod(sizes))
    return jax.tree.map(lambda x: x.reshape(*sizes, x.shape[0] // n, *x.shape[1:]), batch)


def replicate(tree, n=DEVICES):
    return jax.tree.map(lambda x: jnp.stack([x] * n), tree)


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
