"""What a call of a wrapped step costs, against a hand-written `jax.jit` with the same shardings.

    python benchmarks/bench_call.py [--rounds N] [--mesh TEXT]

A step of about 1 ms over a pytree of 200 arrays. Each round waits for one call of each kind, in turns and
in changing order, so that a machine that grows slower counts for both. Prints the ratio of the medians and
exits with 1 where it is above the limit.
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
from jax.sharding import NamedSharding

import jaxshard_magic

LIMIT = 1.03
LEAVES = 200


def step(params: dict[str, jax.Array], batch: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss(p):
        return sum(jnp.mean(jnp.tanh(batch * w) ** 2) for w in p.values()) / LEAVES

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def by_hand(wrapped: Any, params: Any, batch: Any) -> Callable[..., Any]:
    """`jax.jit` of the plain step with the shardings that the wrapped one chose."""
    plan, (tree, out_tree) = wrapped.entry.plan, map(jax.tree.structure, ((params, batch), (params, 0)))
    ins, outs = ([NamedSharding(plan.mesh, s) for s in specs] for specs in (plan.in_specs, plan.out_specs))
    return jax.jit(step, in_shardings=tree.unflatten(ins), out_shardings=out_tree.unflatten(outs))


def seconds(call: Callable[..., Any], params: Any, batch: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    params, _ = jax.block_until_ready(call(params, batch))
    return time.perf_counter() - start, params


def main() -> int:
    parser = argparse.ArgumentParser(description="a wrapped step against a hand-written jit")
    parser.add_argument("--rounds", type=int, default=2000, metavar="N", help="calls of each (default: 2000)")
    parser.add_argument("--mesh", default="cpu:1 data=1", help="mesh text (default: cpu:1 data=1)")
    options = parser.parse_args()
    mesh = jaxshard_magic.mesh(options.mesh)
    rng = np.random.default_rng(0)
    params = {f"w{i}": jnp.asarray(rng.normal(size=64), jnp.float32) for i in range(LEAVES)}
    batch = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)

    wrapped = jaxshard_magic.shard(step, "dp", mesh=mesh)
    wrapped(params, batch)
    calls = {"wrapped": wrapped, "by hand": by_hand(wrapped, params, batch)}
    states = dict.fromkeys(calls, params)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(options.rounds + 50):
        for name in sorted(calls, reverse=bool(i % 2)):
            taken, states[name] = seconds(calls[name], states[name], batch)
            if i >= 50:
                times[name].append(taken)
    for name, values in times.items():
        print(f"{name:8} {statistics.median(values) * 1e3:7.3f} ms, the fastest {min(values) * 1e3:.3f}")
    ratio = statistics.median(times["wrapped"]) / statistics.median(times["by hand"])
    print(f"wrapped / by hand: {ratio:.3f}, at most {LIMIT}, {LEAVES} arrays, {mesh.size} device(s)")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
