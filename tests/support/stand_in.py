"""A small step over two devices, for the tests of `ShardedStep`."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxshard_magic
from jaxshard_magic.step import step_programs


def shard(fn, **options):
    """`fn` as a sharded step over two devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"batch": P("data")} if "batch" in inspect.signature(fn).parameters else {}
    return jaxshard_magic.shard(fn, "dp", mesh=mesh, **({"specs": specs} | options))


RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 3)).astype("f"), "y": RNG.normal(size=(8, 2)).astype("f")}


def params():
    return {"w": jnp.full((3, 2), 0.5, jnp.float32), "b": jnp.zeros(2)}


def descend(params, batch):
    def loss(p):
        return jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def no_way_back(monkeypatch):
    """From here on a call that does not take the short way fails."""

    def fail(*_):
        raise AssertionError("the call was taken apart again")

    monkeypatch.setattr(step_programs, "flatten_call", fail)
