"""What a call of a wrapped NNX step costs, against the same step under `nnx.jit`.

    python benchmarks/bench_nnx.py [--rounds N]

A model of 100 small layers with Adam: 602 arrays, updated in place. Each round waits for one call of each
kind, in turns. Prints the ratio of the medians and exits with 1 where it is above the limit.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxshard_magic

LIMIT = 0.5
LAYERS, WIDTH = 100, 8


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = x + jnp.tanh(layer(x)) / LAYERS
        return x


def step(model: Model, optimizer: nnx.Optimizer, batch: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(batch) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def fresh() -> tuple[Model, nnx.Optimizer]:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def seconds(call: Callable[..., Any], objects: tuple[Model, nnx.Optimizer], batch: jax.Array) -> float:
    start = time.perf_counter()
    call(*objects, batch)
    jax.block_until_ready(jax.tree.leaves(nnx.state(objects[0].layers[-1])))
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description="a wrapped NNX step against nnx.jit")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="calls of each (default: 200)")
    rounds = parser.parse_args().rounds
    mesh = jaxshard_magic.mesh("cpu:1 data=1")
    calls = {"wrapped": jaxshard_magic.shard(step, "dp", mesh=mesh), "nnx.jit": nnx.jit(step)}
    objects = {name: fresh() for name in calls}
    leaves = len(jax.tree.leaves(nnx.state(objects["nnx.jit"])))
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(16, WIDTH)), jnp.float32)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 10):
        for name in calls:
            taken = seconds(calls[name], objects[name], batch)
            if i >= 10:
                times[name].append(taken)
    for name, values in times.items():
        print(f"{name:8} {statistics.median(values) * 1e3:7.2f} ms, the fastest {min(values) * 1e3:.2f}")
    ratio = statistics.median(times["wrapped"]) / statistics.median(times["nnx.jit"])
    print(f"wrapped / nnx.jit: {ratio:.2f}, at most {LIMIT}, {leaves} arrays")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
