"""A planner that stands for the strategies, and a small step, for the tests of `ShardedStep`."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxshard_magic.errors import ShardError
from jaxshard_magic.program.trace import path_name
from jaxshard_magic.step import ShardedStep, sharded


def planner(traced, mesh, strategy, *, specs=None, rules=(), metadata=None, **options):
    """Stands for the strategies: what is called batch is divided over `data`, all else is replicated."""
    names = [path_name(p) for p in traced.in_paths]
    avals = traced.closed.in_avals
    ins = [P("data") if n.startswith("batch") and a.ndim else P() for n, a in zip(names, avals, strict=True)]
    for name, aval, spec in zip(names, avals, ins, strict=True):
        if spec and aval.shape[0] % 2:
            raise ShardError(f"{name} has {aval.shape[0]} examples, which 2 devices can't share")
    outs = [path_name(p).removeprefix("return.").removeprefix("0.") for p in traced.out_paths]
    tails = {n.partition(".")[2]: i for i, n in enumerate(names)} | {n: i for i, n in enumerate(names)}
    pairs = {o: tails[n] for o, n in enumerate(outs) if n in tails and not ins[tails[n]]}
    return SimpleNamespace(
        in_specs=tuple(ins),
        out_specs=(P(),) * len(outs),
        run=jaxpr_as_fun(traced.closed),
        state_pairs=pairs,
        metadata=metadata,
    )


def shard(fn, **options):
    """`fn` as a sharded step over two devices."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    return ShardedStep(fn, "dp", mesh, planner=planner, **options)


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

    monkeypatch.setattr(sharded, "peel", fail)
