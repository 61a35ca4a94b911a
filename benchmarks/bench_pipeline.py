"""What a pipeline costs beside its stages' own work: `python benchmarks/bench_pipeline.py [--rounds N]`.

Prints microseconds a call on 8 simulated devices: `Route`, by which ranks hand arrays on, beside `jax.device_put`, for
1, 2 and 4 arrays from one device to another and from two devices to two others; and a message to another rank and
back. Each figure is the best of N rounds, the two ways in turns, so that other work on the machine counts for neither.

Then whole steps, the best of a few: microseconds an action where the stages have next to nothing to do; steps whose
stages sleep for fixed times, beside the same schedule simulated; the FLOPs of input and weight gradients beside those
of the whole backward pass; and the seconds until a model of 16 layers has run its first step, beside what jax takes to
compile the plain one. Exits with 1 where a figure is above its limit.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("NPROC", "32")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import jaxshard_magic
from jaxshard_magic.pipeline.actors import Actor, run_on_actors
from jaxshard_magic.pipeline.transfer import ArrayTransfer
from jaxshard_magic.schedule import Costs, simulate
from jaxshard_magic.schedule.actions import entry_actions

OF_DEVICE_PUT = 0.5  # what moving arrays as they lie may cost, in device_puts of the same list
AN_ACTION = 80  # microseconds
OF_SIMULATED, FROM_SIMULATED = 1.05, 0.02  # a step's time, and by how much its bubble may differ
OF_WHOLE_BACKWARD = 1.02  # FLOPs
OF_PLAIN_COMPILE = 2.5
SLEEP = 0.1  # seconds; a callback takes one more millisecond by itself
SCHEDULES = {"gpipe": None, "1f1b": None, "interleaved": 2, "zb-h1": None}  # and the chunks of a rank


@dataclass(frozen=True)
class Row:
    """What is timed: `run(n)` does it n times. `beside` is what it is compared with, `limit` a share of that; a round
    is so many `calls`, few, so that some round is not disturbed."""

    name: str
    run: Callable[[int], Any]
    beside: Callable[[int], Any] | None = None
    limit: float | None = None
    calls: int = 25


def layouts() -> dict[str, tuple[Sharding, Sharding]]:
    def over(*numbers: int, spec: tuple = ("data",)) -> Sharding:
        devices = np.array(jax.devices())[list(numbers)]
        return NamedSharding(Mesh(devices, ("data",)), PartitionSpec(*spec))

    return {
        "1 device": (over(0), over(1)),
        "2 devices": (over(0, 1), over(2, 3)),
        "2 devices, rows to columns": (over(0, 1), over(2, 3, spec=(None, "data"))),
    }


def transfers() -> Iterator[Row]:
    for layout, (source, target) in layouts().items():
        alike = "rows" not in layout
        for shape in ((1, 1), (64, 256)):
            # a dimension of 1 can't be cut over two devices
            shape = tuple(max(size, 2 if source.num_devices > 1 else 1) for size in shape)
            for count in (1, 2, 4):
                arrays = [jax.device_put(np.ones(shape, np.float32), source) for _ in range(count)]
                targets, route = [target] * count, ArrayTransfer([target] * count)
                yield Row(
                    f"{count} of {list(shape)}, {layout}",
                    _repeated(lambda route=route, arrays=arrays: route(arrays)),
                    _repeated(lambda arrays=arrays, targets=targets: jax.device_put(arrays, targets)),
                    OF_DEVICE_PUT if alike else None,
                )


def messages() -> Iterator[Row]:
    two = [Actor(rank) for rank in range(2)]

    def back_and_forth(n: int) -> None:
        def work(actor: Actor) -> None:
            for k in range(n):
                if actor.rank == 0:
                    two[1].put(k, None)
                    actor.take(k)
                else:
                    actor.take(k)
                    two[0].put(k, None)

        run_on_actors(two, work)

    yield Row("a message to another rank and back", back_and_forth, calls=200)
    for ranks in (2, 8):
        actors = [Actor(rank) for rank in range(ranks)]
        yield Row(
            f"a run of {ranks} ranks with nothing to do",
            _repeated(lambda actors=actors: run_on_actors(actors, lambda _: None)),
        )


def _repeated(call: Callable[[], Any]) -> Callable[[int], Any]:
    def run(n: int) -> Any:
        made = None
        for _ in range(n):
            made = call()
        return made

    return run


def microseconds(rounds: int, calls: int, *runs: Callable[[int], Any]) -> list[float]:
    """The best of so many rounds, of each."""
    best = [float("inf")] * len(runs)
    for run in runs:
        jax.block_until_ready(run(3))
    for _ in range(rounds):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            made = run(calls)
            best[i] = min(best[i], (time.perf_counter() - start) / calls * 1e6)
            jax.block_until_ready(made)  # between rounds, not in them: a transfer is only begun by the call
    return best


def shown(row: Row, rounds: int) -> bool:
    """Prints a row; whether it is within its limit."""
    if row.beside is None:
        print(f"{row.name:46} {microseconds(rounds, row.calls, row.run)[0]:8.1f}")
        return True
    here, there = microseconds(rounds, row.calls, row.run, row.beside)
    limit = "" if row.limit is None else f", at most {row.limit}"
    print(f"{row.name:46} {here:8.1f} {there:8.1f}   {here / there:.2f}{limit}")
    return row.limit is None or here <= row.limit * there


def descend(layer: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """A train step of layers in a row, each with a weight of its own."""

    def step(ws: list, x: Any) -> tuple[list, Any]:
        def loss(ws: list) -> Any:
            h = x
            for w in ws:
                h = layer(h, w)
            return jnp.mean(jnp.square(h))

        value, grads = jax.value_and_grad(loss)(ws)
        return [w - 0.01 * g for w, g in zip(ws, grads, strict=True)], value

    return step


def _later(x: Any) -> Any:
    def wait(value: Any) -> Any:
        time.sleep(SLEEP)
        return value

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


# a layer whose forward pass and two gradients take SLEEP each, and next to no processor
sleeping = jax.custom_vjp(lambda x, w: _later(x @ w))
sleeping.defvjp(lambda x, w: (_later(x @ w), (x, w)), lambda kept, g: (_later(g @ kept[1].T), _later(kept[0].T @ g)))


def piped(step: Callable[..., Any], ranks: int, name: str, microbatches: int) -> Any:
    options = {"mesh": f"pipe={ranks}", "microbatches": microbatches, "chunks": SCHEDULES.get(name)}
    return jaxshard_magic.shard(step, "pp", schedule=name, **options)


def overhead(ranks: int, name: str, steps: int = 100) -> bool:
    """Of an action, in steps of which nothing is timed; beside the plain step as one program."""
    layers, x = ranks * (SCHEDULES[name] or 1), jnp.ones((32, 4))
    step = descend(lambda x, w: x @ w)
    ways = piped(step, ranks, name, 16), jax.jit(step)
    states, best = [[jnp.eye(4)] * layers] * 2, [float("inf")] * 2
    for _ in range(steps):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            states[i], _ = jax.block_until_ready(way(states[i], x))
            best[i] = min(best[i], time.perf_counter() - start)
    grid = ways[0].entry.compiled.split.schedule.grid
    actions = sum(len(entry_actions(each)) for row in grid for each in row)
    mine, plain = best[0] / actions * 1e6, best[1] * 1e6
    print(f"{f'{ranks} ranks, {name}, an action':46} {mine:8.1f} {plain:10.1f}   at most {AN_ACTION}; the plain step")
    return mine <= AN_ACTION


def asleep(ranks: int, name: str) -> bool:
    """A step of sleeping stages beside the same schedule simulated with the times that they sleep."""
    layers = ranks * (SCHEDULES[name] or 1)
    step, x = piped(descend(sleeping), ranks, name, 8), jnp.ones((16, 4))
    ws = [jnp.eye(4)] * layers
    while step.entry is None or step.entry.compiled.last_run is None:
        step(ws, x)
    run = step.entry.compiled.last_run
    costs = Costs([SLEEP] * layers, [0.0] + [SLEEP] * (layers - 1), [SLEEP] * layers, 0.0)
    ideal = simulate(run.schedule, costs)
    ratio, off = run.seconds / ideal.makespan, abs(run.bubble() - ideal.bubble)
    print(
        f"{f'{ranks} ranks, {name}, asleep: s, simulated':46} {run.seconds:8.3f} {ideal.makespan:10.3f}   {ratio:.3f}, "
        f"at most {OF_SIMULATED}; bubble {run.bubble():.3f}, simulated {ideal.bubble:.3f}"
    )
    return ratio <= OF_SIMULATED and off <= FROM_SIMULATED


def halves() -> bool:
    """The FLOPs of both halves of a backward pass beside those of the whole."""
    step, ws = descend(lambda x, w: jax.nn.gelu(x @ w) @ w.T), [jnp.ones((64, 256))] * 4
    flops = {}
    for name in ("1f1b", "zb-h1"):
        way = piped(step, 2, name, 2)
        way(ws, jnp.ones((32, 64)))
        programs = way.entry.compiled.programs
        flops |= {kind: programs[kind, 1].compiled.cost_analysis()["flops"] for kind in "BIW" if (kind, 1) in programs}
    both = flops["I"] + flops["W"]
    ratio = both / flops["B"]
    print(
        f"{'FLOPs of input and weight gradient, whole':46} {both:8.0f} {flops['B']:10.0f}   {ratio:.3f}, at most "
        f"{OF_WHOLE_BACKWARD}"
    )
    return ratio <= OF_WHOLE_BACKWARD


def first_step(layers: int = 16, width: int = 64, heads: int = 4) -> bool:
    """Of a transformer, unrolled, beside tracing and compiling it as it is."""

    def heads_of(x: Any) -> Any:
        return x.reshape(*x.shape[:-1], heads, -1)

    def layer(x: Any, p: dict) -> Any:
        h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        h = jax.nn.dot_product_attention(*map(heads_of, jnp.split(h @ p["qkv"], 3, -1)), is_causal=True)
        x = x + h.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    def step(ps: list, x: Any) -> tuple[list, Any]:
        def loss(ps: list) -> Any:
            h = x
            for p in ps:
                h = layer(h, p)
            return jnp.mean(jnp.square(h))

        value, grads = jax.value_and_grad(loss)(ps)
        return jax.tree.map(lambda p, g: p - 0.01 * g, ps, grads), value

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    keys = jax.random.split(jax.random.key(0), layers)
    ps = [{name: 0.1 * jax.random.normal(key, shape) for name, shape in shapes.items()} for key in keys]
    x = jnp.ones((16, 16, width))
    start = time.perf_counter()
    jax.jit(step).lower(ps, x).compile()
    between = time.perf_counter()
    jax.block_until_ready(piped(step, 4, "1f1b", 8)(ps, x))
    mine, plain = time.perf_counter() - between, between - start
    print(
        f"{f'first step of {layers} layers in 4 stages: s, jit':46} {mine:8.2f} {plain:10.2f}   {mine / plain:.2f}, at "
        f"most {OF_PLAIN_COMPILE}"
    )
    return mine <= OF_PLAIN_COMPILE * plain


def main() -> int:
    parser = argparse.ArgumentParser(description="what a pipeline costs beside its stages' own work")
    parser.add_argument(
        "--rounds", type=int, default=100, metavar="N", help="rounds of 25 calls and more (default: 100)"
    )
    rounds = parser.parse_args().rounds
    jaxshard_magic.mesh("cpu:8 pipe=8")
    print(f"{'microseconds':46} {'Route':>8} {'device_put':>10}  ratio")
    fine = [shown(row, rounds) for row in (*transfers(), *messages())]
    fine += [overhead(ranks, name) for ranks in (4, 8) for name in SCHEDULES]
    fine += [asleep(ranks, name) for ranks in (4, 8) for name in SCHEDULES]
    fine += [halves(), first_step()]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
