"""What the line of a cell that trains costs its loop.

    python benchmarks/bench_progress.py [--rounds N]

Runs in a real kernel, so that every line is published to a front end. Two steps of about a millisecond, one of 2
arrays and one of 200; each round is a short loop with the line and one without, in changing order. Prints the
median of the rounds' ratios and where half of them lie, and exits with 1 where a median is above the limit. What
the line's own thread takes of a processor is the part of it that a busy machine can't blur.
"""

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
from in_kernel import good_in_kernel

import jaxshard_magic
from jaxshard_magic.notebook import loop_progress
from jaxshard_magic.notebook.progress import Progress, line_for
from jaxshard_magic.step import LoopMonitor, ShardedStep

LIMIT = 1.01
SECONDS = 0.82  # of one loop; the line is looked at five times a second and written at every second look


def few(params: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch @ params["w"] + params["b"]) - 1) ** 2)


def many(params: Any, batch: Any) -> Any:
    return sum(jnp.mean(jnp.tanh(batch * w) ** 2) for w in params.values()) / len(params)


STEPS: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]], tuple[int, int]]] = {
    "2 arrays": (few, {"w": (256, 256), "b": (256,)}, (128, 256)),
    "200 arrays": (many, {f"w{i}": (64,) for i in range(200)}, (8, 64)),
}


def made(name: str) -> tuple[ShardedStep, Any, Any]:
    """The step under data parallelism, its parameters and its batch."""
    loss_fn, shapes, batch = STEPS[name]

    def train_step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    step = jaxshard_magic.shard(train_step, "dp", mesh=jaxshard_magic.mesh("cpu:1 data=1"))
    return step, {k: jnp.full(shape, 0.01, jnp.float32) for k, shape in shapes.items()}, jnp.ones(batch)


def loop(step: ShardedStep, params: Any, batch: Any, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        params, _ = step(params, batch)
    jax.block_until_ready(params)
    return time.perf_counter() - start


def told(step: ShardedStep, params: Any, batch: Any, steps: int, shell: Any) -> tuple[float, float]:
    """The loop's seconds with the line, as `%%shard` shows it, and what its thread took of a processor's."""
    watch = LoopMonitor()
    with (
        Progress(line_for(shell), label="train_step") as progress,
        progress.following(loop_progress.LoopProgress(watch.finished_calls, lambda: steps)),
    ):
        watch.follow(step)
        taken = loop(step, params, batch, steps)
        watch.stop()
        (thread,) = (t for t in threading.enumerate() if t.name == "jaxshard progress")
        assert thread.ident is not None
        return taken, time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def ratios(shell: Any, rounds: int) -> bool:
    """Runs in the kernel; whether all are within the limit."""
    loop_progress.EVIDENT = 0.0  # the loops are short
    good = True
    for name in STEPS:
        step, params, batch = made(name)
        loop(step, params, batch, 300)
        steps = round(SECONDS / loop(step, params, batch, 300) * 300)
        with_line, without, busy = [], [], []
        for i in range(rounds):
            for telling in sorted((True, False), reverse=bool(i % 2)):
                if telling:
                    taken, of_thread = told(step, params, batch, steps, shell)
                    with_line.append(taken)
                    busy.append(of_thread / taken)
                else:
                    without.append(loop(step, params, batch, steps))
        of = [a / b for a, b in zip(with_line, without, strict=True)]
        low, middle, high = statistics.quantiles(of, n=4)
        print(
            f"{name}, {statistics.median(without) / steps * 1e3:.2f} ms a step: with the line / without "
            f"{middle:.4f}, half of {rounds} rounds within {low:.3f} to {high:.3f}, at most {LIMIT}; "
            f"its thread is busy {statistics.median(busy):.2%} of the time"
        )
        good &= middle <= LIMIT
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="a loop with the line of its progress against one without")
    parser.add_argument("--rounds", type=int, default=100, metavar="N", help="for each step (default: 100)")
    rounds = parser.parse_args().rounds
    lines = 0

    def count(message: dict[str, Any]) -> None:
        nonlocal lines
        kind, content = message["msg_type"], message["content"]
        lines += kind in ("display_data", "update_display_data") and content["data"]["text/plain"] != ""

    good = good_in_kernel("bench_progress", rounds, count)
    print(f"{lines} lines were shown")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
