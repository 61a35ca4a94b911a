"""Six strategies compared at once, beside the same six one after the other: `python benchmarks/bench_compare.py`.

A transformer of 100 million parameters on 8 simulated devices, each strategy compiled, run and checked against the
plain step. One by one each is timed over three more calls (`--check --repeat 3`), in a comparison over as many as are
enough. Each way has a process of its own. Prints the seconds of both and their ratio; exits with 1 where that is above
its limit.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import jaxshard_magic
from jaxshard_magic.search import REPEAT

LIMIT = 0.75
STRATEGIES = ("dp", "fsdp", "tp", "fsdp+tp", "pp", "pp+fsdp")
DEVICES = 8
WIDTH, HEADS, LAYERS, VOCAB = 768, 12, 12, 16_384
EXAMPLES, TOKENS = 16, 8


def init(key: Any) -> dict[str, Any]:
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, LAYERS * len(shapes) + 1))
    make = partial(jax.random.normal, dtype=jnp.float32)
    layers = [{name: 0.02 * make(next(keys), shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {"layers": layers, "embedding": 0.02 * make(next(keys), (VOCAB, WIDTH))}


def normed(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    q, k, v = (y.reshape(*y.shape[:2], HEADS, -1) for y in jnp.split(normed(x) @ p["qkv"], 3, -1))
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normed(x) @ p["up"]) @ p["down"]


def train_step(params: dict[str, Any], batch: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: dict[str, Any]) -> jax.Array:
        x = params["embedding"][batch[:, :-1]]
        for p in params["layers"]:
            x = layer(x, p)
        logits = normed(x) @ params["embedding"].T
        told = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)
        return -told.mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def together(args: tuple[Any, ...], mesh: Any) -> list[float | None]:
    found = jaxshard_magic.compare(train_step, STRATEGIES, args, mesh=mesh)
    assert all(t.report and t.report.check and t.report.check.passed for t in found.trials), found.to_text()
    return [trial.measured for trial in found.trials]


def one_by_one(args: tuple[Any, ...], mesh: Any) -> list[float | None]:
    seconds = []
    for strategy in STRATEGIES:
        step = jaxshard_magic.shard(train_step, strategy, check=True)
        step.keep_arguments = True
        step(*args)
        step.repeat(REPEAT)
        report = step.report()
        assert report.check is not None and report.check.passed
        seconds.append(report.timing.step_s.median if report.timing and report.timing.step_s else None)
    return seconds


def measured(way: str) -> None:
    mesh = jaxshard_magic.mesh(f"cpu:{DEVICES} data={DEVICES}")
    args = init(jax.random.key(0)), jnp.zeros((EXAMPLES, TOKENS + 1), jnp.int32)
    jax.block_until_ready(args)
    start = time.perf_counter()
    steps = {"together": together, "one by one": one_by_one}[way](args, mesh)
    print(json.dumps({"seconds": time.perf_counter() - start, "steps": steps}))


def main() -> int:
    parser = argparse.ArgumentParser(description="a comparison beside its strategies one after the other")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="rounds (default: 1)")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        measured(given.way)
        return 0
    best: dict[str, float] = {}
    for _ in range(given.rounds):
        for way in ("one by one", "together"):
            done = subprocess.run(
                [sys.executable, __file__, "--way", way], stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            best[way] = min(best.get(way, found["seconds"]), found["seconds"])
            steps = ", ".join(f"{s} {t:.2f}" for s, t in zip(STRATEGIES, found["steps"], strict=True) if t)
            print(f"{way:12} {found['seconds']:8.1f} s   a step: {steps}", flush=True)
    ratio = best["together"] / best["one by one"]
    print(f"{'together / one by one':24} {ratio:.2f}, at most {LIMIT}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
