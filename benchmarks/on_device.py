"""Measure what attached accelerators sustain, and train models on them beside their predictions:
`python benchmarks/on_device.py`.

First the device alone: matrix products by shape and dtype, reads and writes of its memory, the time between kernels,
the link to the host, and with several devices collectives by size. Then models of `models/`, filled with random
numbers. Each prints its step, peak memory and model FLOPs utilization (MFU), predicted and measured, and the lines on
which the profiler saw the time go. On simulated CPU devices nothing is predicted; `--quick` makes all of it small.

Operands are random: a product of zeros draws less power and runs faster than real ones.
"""

import argparse
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from models import gpt, llama, resnet, vit
from models.parts import Call

import jaxshard_magic
from jaxshard_magic.hardware import Chip, chip_of
from jaxshard_magic.packages import installed

ROUNDS = 5  # timed calls of each program, of which the median counts
CHAIN = 16  # products in one program, so that its launch is a small part of it
MIB = 2**20
VOCABULARY = 1000  # tokens and labels are drawn below this: every model here knows as many


@dataclass(frozen=True)
class Measurement:
    """One program on the device.

    Attributes:
        what: The kind: "product", "memory", "launch", "host link" or a collective's name.
        case: Shape, dtype or direction.
        seconds: Median of the timed calls, for one product, pass, launch or transfer.
        rate: FLOP/s or bytes/s; None for a latency.
        published: The chip's published figure for the same; None where none is known.
    """

    what: str
    case: str
    seconds: float
    rate: float | None
    published: float | None

    def __str__(self) -> str:
        unit = "FLOP/s" if self.what == "product" else "B/s"
        rate = "" if self.rate is None else f"{self.rate:10.3e} {unit}"
        share = "" if not self.rate or not self.published else f"{self.rate / self.published:6.3f} of published"
        return f"{self.what:16} {self.case:34} {self.seconds * 1e6:12.1f} us {rate} {share}"


@dataclass(frozen=True)
class Trained:
    """One model's step, predicted and measured. Seconds, bytes and shares; None for what is not known.

    Attributes:
        predicted: Step in seconds: least, best guess, most.
        step: Median of the timed calls.
        peak_planned: Bytes on the fullest device by the compiled program.
        peak: Bytes that the device's allocator had in use at most, of all that ran so far.
        mfu: Model FLOPs over what the published peak allows in `step`.
        lines: Seconds by line, as the profiler saw them, longest first.
    """

    model: str
    parameters: int
    strategy: str
    predicted: tuple[float | None, float | None, float | None]
    step: float | None
    compile: float | None
    peak_planned: int | None
    peak: int | None
    mfu: float | None
    lines: tuple[tuple[str, float, float | None], ...]

    def __str__(self) -> str:
        low, best, high = (_milliseconds(s) for s in self.predicted)
        off = "" if not self.step or not self.predicted[1] else f" ({self.predicted[1] / self.step - 1:+.0%})"
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.3f}"
        peaks = f"peak {_gib(self.peak_planned)} by the program, {_gib(self.peak)} in use"
        head = (
            f"{self.model}, {self.parameters / 1e6:,.0f}M parameters, {self.strategy}: "
            f"predicted {best} ({low} to {high}){off}, measured {_milliseconds(self.step)}{mfu}; {peaks}; "
            f"compiled in {_milliseconds(self.compile)}"
        )
        rows = (
            f"    {_milliseconds(took):>10} (predicted {_milliseconds(guess)})  {at}" for at, took, guess in self.lines
        )
        return "\n".join((head, *rows))


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.2f} ms"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def seconds_of(program: Callable[..., Any], *args: Any) -> float:
    """Return the median seconds of a call that has been compiled and warmed up, by the host's clock."""
    jax.block_until_ready(program(*args))
    took = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def products(chip: Chip | None, quick: bool) -> Iterator[Measurement]:
    """Time `[m, k] @ [k, n]` and back, `CHAIN` products in one program: squares, and a transformer's MLP."""
    squares = [(n, n, n) for n in ((256, 512) if quick else (512, 1024, 2048, 4096, 8192, 16_384))]
    blocks = [] if quick else [(8192, 1024, 4096), (8192, 2048, 8192), (8192, 4096, 14_336), (16_384, 1408, 6144)]
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        name = jnp.dtype(dtype).name
        for m, k, n in squares + blocks if dtype == jnp.bfloat16 else squares[1::2]:
            x, up, down = (
                jax.random.normal(jax.random.key(i), shape, dtype) / shape[-2] ** 0.5
                for i, shape in enumerate(((m, k), (k, n), (n, k)))
            )

            @jax.jit
            def chain(x, up, down):
                for _ in range(CHAIN // 2):
                    x = (x @ up) @ down
                return x

            each = seconds_of(chain, x, up, down) / CHAIN
            peak = None if chip is None else chip.peak(name)
            yield Measurement("product", f"{name} {m} x {k} x {n}", each, 2 * m * k * n / each, peak)


def memory(chip: Chip | None, quick: bool) -> Iterator[Measurement]:
    """Time elementwise passes over arrays, `CHAIN` in one program; the rate counts bytes read and bytes written."""
    published = None if chip is None else chip.hbm_bandwidth
    for size in (MIB,) if quick else (16 * MIB, 256 * MIB, 2048 * MIB):
        x, y = (jax.random.normal(jax.random.key(i), (size // 4,), jnp.float32) for i in range(2))

        @jax.jit
        def written(x):
            for _ in range(CHAIN):
                x = jax.lax.optimization_barrier(x + 1)  # or XLA would fuse all passes into one
            return x

        @jax.jit
        def read(x):
            total = jnp.float32(0)
            for _ in range(CHAIN):
                x, total = jax.lax.optimization_barrier((x, total + jnp.sum(x + total)))
            return total

        @jax.jit
        def triad(x, y):
            for _ in range(CHAIN):
                x = jax.lax.optimization_barrier(x + 0.5 * y)
            return x

        for case, took, moved in (
            ("read", seconds_of(read, x), size),
            ("read and write", seconds_of(written, x), 2 * size),
            ("read two, write one", seconds_of(triad, x, y), 3 * size),
        ):
            each = took / CHAIN
            yield Measurement("memory", f"{case}, {size // MIB} MiB", each, moved / each, published)


def launches() -> Iterator[Measurement]:
    """Time what is paid for each program and for each kernel inside of one."""
    x, count = jax.random.normal(jax.random.key(0), (128, 128)), 256
    tiny = jax.jit(lambda x: x + 1)

    def dispatched(x):
        for _ in range(count):
            x = tiny(x)
        return x

    yield Measurement("launch", "program, many in flight", seconds_of(dispatched, x) / count, None, None)
    yield Measurement("launch", "program, waited for", seconds_of(tiny, x), None, None)

    @jax.jit
    def kernels(x):
        for _ in range(count):
            x = x @ x
        return x

    yield Measurement("launch", "product of 128 in one program", seconds_of(kernels, x / 12) / count, None, None)


def host_link(quick: bool) -> Iterator[Measurement]:
    """Time arrays between host and device: from NumPy, to NumPy, and pinned memory both ways where there is any."""
    size = MIB if quick else 512 * MIB
    device = jax.devices()[0]
    array = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
    took = seconds_of(lambda: jax.device_put(array, device))
    yield Measurement("host link", f"from NumPy, {size // MIB} MiB", took, size / took, None)
    took = seconds_of(lambda: np.asarray(jax.device_put(array, device) + 1)) - seconds_of(
        lambda: jax.device_put(array, device) + 1
    )
    yield Measurement("host link", f"to NumPy, {size // MIB} MiB", took, size / took, None)
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" in kinds:
        there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        here = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        on_device, on_host = jax.device_put(array, here), jax.device_put(array, there)
        for case, x, to in (("device to pinned host", on_device, there), ("pinned host to device", on_host, here)):
            took = seconds_of(lambda x=x, to=to: jax.device_put(x, to))
            yield Measurement("host link", f"{case}, {size // MIB} MiB", took, size / took, None)


def collectives(quick: bool) -> Iterator[Measurement]:
    """Time collectives over all devices; the rate is what one device sends on a ring, over the time."""
    n = jax.device_count()
    if n == 1:
        return
    mesh, rows = Mesh(np.asarray(jax.devices()), ("all",)), PartitionSpec("all")
    kinds: dict[str, tuple[Callable[[jax.Array], jax.Array], float]] = {
        "all-reduce": (lambda x: jax.lax.psum(x, "all"), 2 * (n - 1) / n),
        "all-gather": (lambda x: jax.lax.all_gather(x, "all", tiled=True), n - 1),
        "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "all", tiled=True), (n - 1) / n),
        "all-to-all": (lambda x: jax.lax.all_to_all(x, "all", 0, 0, tiled=True), (n - 1) / n),
        "permute": (lambda x: jax.lax.ppermute(x, "all", [(i, (i + 1) % n) for i in range(n)]), 1),
    }
    for size in (MIB // 4,) if quick else (MIB // 4, 4 * MIB, 64 * MIB, 512 * MIB):
        x = jax.device_put(np.ones((n * size // 4,), np.float32), NamedSharding(mesh, rows))
        for kind, (send, share) in kinds.items():
            out = PartitionSpec() if kind in ("all-reduce", "all-gather") else rows
            program = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=rows, out_specs=out, check_vma=False))
            took = seconds_of(program, x)
            yield Measurement(kind, f"{size / MIB:g} MiB on each of {n}", took, share * size / took, None)


QUICK: dict[str, Callable[[int], Call]] = {
    "GPT-2, tiny": lambda n: gpt.call(gpt.Size(2, 64, 2, 32, vocabulary=VOCABULARY), 2 * n),
    "Llama, tiny": lambda n: llama.call(llama.Size(2, 64, 2, 1, 32, 128, VOCABULARY, 1e4), 2 * n, 32),
}
# Sized so that one device of 80 GB holds the state twice (a timed step runs on copies) and its activations.
MODELS: dict[str, Callable[[int], Call]] = {
    "GPT-2 medium, 8 x 1024 tokens": lambda n: gpt.call(gpt.MEDIUM, 8 * n),
    "GPT-2 large, recomputed, 16 x 1024 tokens": lambda n: gpt.call(gpt.Size(36, 1280, 20, 1024, remat=True), 16 * n),
    "Qwen3 0.6B, 4 x 2048 tokens": lambda n: llama.call(llama.QWEN3_600M, 4 * n, 2048),
    "Llama of 1.1B, 4 x 2048 tokens": lambda n: llama.call(
        llama.Size(22, 2048, 32, 4, 64, 5632, 32_000, 1e4), 4 * n, 2048
    ),
    "ResNet-50, 256 images": lambda n: resnet.call(resnet.DEPTH_50, 256 * n),
    "ViT-L/16, 128 images": lambda n: vit.call(vit.Size(24, 1024, 16, 4096, 16), 128 * n),
}


def filled(args: Any) -> Any:
    """Replace every `jax.ShapeDtypeStruct` by an array: small normal numbers, and whole numbers below `VOCABULARY`.

    Second moments of an optimizer must not be negative, so that all numbers are made positive.
    """
    keys = iter(jax.random.split(jax.random.key(0), 10_000))

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return (
                jax.random.randint(next(keys), leaf.shape, 0, VOCABULARY, leaf.dtype)
                if leaf.shape
                else jnp.zeros((), leaf.dtype)
            )
        return abs(0.02 * jax.random.normal(next(keys), leaf.shape, leaf.dtype))

    return jax.tree.map(array, args)


def trained(name: str, make: Callable[[int], Call], strategy: str, out: Path | None) -> Trained:
    """Run one model's step, time it and record it; `out` gets its whole report as JSON and the trace."""
    n = jax.device_count()
    call = make(n)
    step = jaxshard_magic.shard(call.step, strategy, mesh=f"data={n}", name=name)
    step.keep_arguments = True
    jax.block_until_ready(step(*filled(call.args)))
    step.repeat(10)
    folder = None if out is None else out / _slug(name)
    try:
        step.profile(5, trace=folder)
    except Exception:  # what was measured without it counts all the same
        traceback.print_exc()
    report = step.report()
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(report.to_json())
        (folder / "report.txt").write_text(report.to_text())
    times, memory = report.timing, report.memory
    assert times is not None  # a step that has run has been timed
    seconds = None if times.step_s is None else times.step_s.median
    stats = jax.local_devices()[0].memory_stats() or {}
    fullest = None if memory is None else max((d.peak or 0 for d in memory.per_device), default=0) or None
    spent = () if report.measured is None else report.measured.lines
    return Trained(
        name,
        call.parameters,
        strategy,
        (times.predicted_low_s, times.predicted_step_s, times.predicted_high_s),
        seconds,
        times.compile_s,
        fullest,
        stats.get("peak_bytes_in_use"),
        None if seconds is None else utilization(times.flops, seconds),
        tuple((f"{row.file}:{row.line} {row.phase}", row.seconds, row.predicted) for row in spent[:8]),
    )


def utilization(flops: float | None, seconds: float) -> float | None:
    """Return a device's FLOPs of one step over what its published bfloat16 peak makes in `seconds`."""
    chip = chip_of(jax.devices()[0].device_kind)
    peak = None if chip is None else chip.peak("bfloat16")
    return None if flops is None or not peak else flops / (seconds * peak)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="everything small: seconds on a CPU")
    parser.add_argument("--only", choices=("device", "models"), help="one of the two halves")
    parser.add_argument("--models", default="", help="names of models, or parts of them, with commas between")
    parser.add_argument("--strategy", default="dp")
    parser.add_argument("--out", type=Path, help="a folder for figures, reports and traces")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    chip = chip_of(device.device_kind)
    packages = installed()
    versions = ", ".join(f"{name} {packages[name]}" for name in ("jax", "jaxlib", "flax") if name in packages)
    print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), {versions}; known as {chip and chip.name}")
    measured: list[Measurement] = []
    if args.only != "models":
        for part in (partial(products, chip), partial(memory, chip), lambda _: launches(), host_link, collectives):
            for row in part(args.quick):
                print(row, flush=True)
                measured.append(row)
    runs: list[Trained] = []
    if args.only != "device":
        wanted = [part.strip().lower() for part in args.models.split(",")]
        for name, make in (QUICK if args.quick else MODELS).items():
            if not any(part in name.lower() for part in wanted):
                continue
            try:
                runs.append(trained(name, make, args.strategy, args.out))
            except Exception:  # a model that fails is told, and the next one is tried
                print(f"{name}:", file=sys.stderr)
                traceback.print_exc()
                continue
            print(runs[-1], flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        rows = {
            "device": device.device_kind,
            "measured": list(map(asdict, measured)),
            "trained": list(map(asdict, runs)),
        }
        (args.out / "figures.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
