"""What recording a step costs: `python benchmarks/bench_profile.py [LAYERS]`.

An unrolled transformer on 8 simulated devices. Printed: the seconds that recording 5 steps and reading them back takes
over those that ran, which are fewer than 5 where not all would be read; a step under a recording against one without,
medians of calls in turns, by the clock and in time of the cores, and how much of that is each event that is recorded;
the bytes that the report grows by. Exits with 1 above a limit.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import jax
from jax.profiler import ProfileData
from theory import steps

import jaxshard_magic
from jaxshard_magic.step.profiler_recording import DEFAULT_CALLS, record

OVER_S, RATIO, BYTES = 5.0, 1.10, 20_000
ROUNDS, EACH = 7, 3  # of calls with and without a recording in turns


def sharded(layers: int) -> jaxshard_magic.ShardedStep:
    """The step, called once."""
    steps.LAYERS = layers
    call = steps.transformer(scan=False)
    mesh = jaxshard_magic.mesh("cpu:8 data=4 model=2")
    step = jaxshard_magic.shard(call.step, "fsdp+tp", mesh=mesh)
    step.keep_arguments = True
    jax.block_until_ready(step(call.state, call.batch))
    return step


def over_the_steps(step: jaxshard_magic.ShardedStep) -> tuple[float, int]:
    """Seconds of recording and reading beyond those of the steps; and the bytes that the report grows by."""
    report = step.report()  # the program is read
    start = time.perf_counter()
    found = step.profile(DEFAULT_CALLS)
    took = time.perf_counter() - start
    grown = len(step.report().to_json()) - len(replace(report, measured=None).to_json())
    print(
        f"{found.operations:,} operations on a device, {found.recorded} of {found.asked} steps recorded, "
        f"{found.read} read, step {found.step_s.median * 1e3:.0f} ms"
    )
    return took - (found.recorded + 1) * (found.step_s.median + found.dispatch), grown


class Call(NamedTuple):
    """Seconds by the clock, and of all cores together."""

    took: float
    cores: float


def medians(calls: Sequence[Call]) -> Call:
    return Call(*map(statistics.median, zip(*calls, strict=True)))


def under_a_recording(step: jaxshard_magic.ShardedStep) -> float:
    """A call under a recording, as a multiple of one without."""
    entry, inputs = step.inputs(None)

    def timed(into: list[Call]) -> None:
        start, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(entry.call(*inputs))
        into.append(Call(time.perf_counter() - start, time.process_time() - used))

    without, under, events = list[Call](), list[Call](), 0.0
    for _ in range(ROUNDS):
        for _ in range(EACH):
            timed(without)
        calls: list[Callable[[], Any]] = [partial(timed, each) for each in ([], *[under] * EACH)]
        planes = ProfileData.from_serialized_xspace(record(calls, "bench")).planes
        events = sum(1 for plane in planes for line in plane.lines for _ in line.events) / len(calls)
    one, other = medians(without), medians(under)
    more = (other.cores - one.cores) / events
    print(
        f"{events:,.0f} events a step, for which the cores work {other.cores / one.cores:.2f} of what they do without: "
        f"{more * 1e9:.0f} ns an event"
    )
    return other.took / one.took


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="?", type=int, default=48)
    step = sharded(parser.parse_args().layers)
    seconds, grown = over_the_steps(step)
    ratio = under_a_recording(step)
    print(f"recording {DEFAULT_CALLS} steps and reading them: {seconds:.2f} s over the steps, at most {OVER_S}")
    print(f"a step under a recording / without: {ratio:.2f}, at most {RATIO}")
    print(f"the report grows by {grown:,} bytes, at most {BYTES:,}")
    return int(seconds > OVER_S or ratio > RATIO or grown > BYTES)


if __name__ == "__main__":
    sys.exit(main())
