"""What a pipeline costs beside its stages' own work: `python benchmarks/bench_pipeline.py [--rounds N]`.

Prints microseconds a call on 8 simulated devices: `Route`, by which ranks hand arrays on, beside `jax.device_put`, for
1, 2 and 4 arrays from one device to another and from two devices to two others; and a message to another rank and
back. Each figure is the best of N rounds, the two ways in turns, so that other work on the machine counts for neither.
Exits with 1 where a figure is above its limit.
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
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

import jaxshard_magic
from jaxshard_magic.pipeline.actors import Actor, together
from jaxshard_magic.pipeline.transfer import Route

OF_DEVICE_PUT = 0.5  # what moving arrays as they lie may cost, in device_puts of the same list


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
                targets, route = [target] * count, Route([target] * count)
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
                    two[1].give(k, None)
                    actor.take(k)
                else:
                    actor.take(k)
                    two[0].give(k, None)

        together(two, work)

    yield Row("a message to another rank and back", back_and_forth, calls=200)
    for ranks in (2, 8):
        actors = [Actor(rank) for rank in range(ranks)]
        yield Row(
            f"a run of {ranks} ranks with nothing to do",
            _repeated(lambda actors=actors: together(actors, lambda _: None)),
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


def main() -> int:
    parser = argparse.ArgumentParser(description="what a pipeline costs beside its stages' own work")
    parser.add_argument(
        "--rounds", type=int, default=100, metavar="N", help="rounds of 25 calls and more (default: 100)"
    )
    rounds = parser.parse_args().rounds
    jaxshard_magic.mesh("cpu:8 pipe=8")
    print(f"{'microseconds':46} {'Route':>8} {'device_put':>10}  ratio")
    fine = [shown(row, rounds) for row in (*transfers(), *messages())]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
