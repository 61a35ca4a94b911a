"""Trace, analysis, re-emission and compile time of unrolled transformers: `python benchmarks/bench_compile.py`.

The ratio is the sharded step's compile time over plain jit's with the same in and out shardings, in one run.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("NPROC", "32")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding
from theory import steps

import jaxshard_magic
from jaxshard_magic.config.request import make_request
from jaxshard_magic.program.flatten_call import flatten_call
from jaxshard_magic.program.trace import trace
from jaxshard_magic.program.unwrap import unwrap_step
from jaxshard_magic.strategies import find_facts, plan


def timed(f):
    start = time.perf_counter()
    out = f()
    return time.perf_counter() - start, out


def bench(layers: int, rounds: int, mesh: jax.sharding.Mesh) -> None:
    steps.LAYERS = layers
    call = steps.transformer()
    peeled = flatten_call(unwrap_step(call.step), (call.state, call.batch), {})
    paths = [path for path, _, _ in peeled.inputs]
    trace_s, traced = timed(lambda: trace(lambda *xs: peeled.flat_function(*xs)[:2], peeled.leaves, paths))
    request = make_request("fsdp+tp", mesh)
    plan_s, planned = timed(lambda: plan(find_facts(traced, request), request))
    emit_s, _ = timed(lambda: jax.make_jaxpr(planned.run)(*peeled.leaves))
    shardings = {
        "in_shardings": tuple(NamedSharding(mesh, s) for s in planned.in_specs),
        "out_shardings": [NamedSharding(mesh, s) for s in planned.out_specs],
    }
    compiles: dict[str, list[float]] = {"ours": [], "plain": []}
    for _ in range(rounds):
        for name, fun in (("ours", planned.run), ("plain", jaxpr_as_fun(traced.closed))):
            jax.clear_caches()
            lowered = jax.jit(lambda *xs, fun=fun: fun(*xs), **shardings).lower(*peeled.leaves)
            compiles[name].append(timed(lowered.compile)[0])
    ours, plain = (statistics.median(compiles[k]) for k in ("ours", "plain"))
    print(
        f"{layers:3d} layers, {len(traced.closed.eqns)} equations: trace {trace_s:.2f} s, analysis {plan_s:.2f} s, "
        f"re-emission {emit_s:.2f} s (analysis and re-emission {plan_s + emit_s:.2f} s, at most 6); "
        f"compile {ours:.1f} s, plain jit {plain:.1f} s, ratio {ours / plain:.2f} (at most 1.15)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 48])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    mesh = jaxshard_magic.mesh("cpu:8 data=4 model=2")
    for layers in options.layers:
        bench(layers, options.rounds, mesh)


if __name__ == "__main__":
    main()
