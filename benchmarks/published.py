"""Predicted steps beside published ones: `python benchmarks/published.py`.

Each case is a training run whose share of the chips' peak somebody has published with its configuration. A model of the
same shapes is planned for the same slice, and with --compile compiled, under the same compiler's options, each in a
process of its own; its step is predicted, and what it took follows from the published share and the FLOPs that this
counts. The one figure that such runs decide, what large products sustain of the peak, is for each case taken from the
others. Exits with 1 where a prediction is above its limit.
"""

import argparse
import os
import pickle
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from models import llama

import jaxshard_magic
from jaxshard_magic.analysis.leaves import leaves
from jaxshard_magic.analysis.overlap import CollectiveSchedule
from jaxshard_magic.analysis.program_reading import program_reading
from jaxshard_magic.analysis.roofline import PEAK_SHARE, Roofline, roofline, with_schedule
from jaxshard_magic.hardware import chip
from jaxshard_magic.plan import DeviceWork, wire_bytes
from jaxshard_magic.report import Collective, Leaf
from jaxshard_magic.search.plan_estimate import to_report_collective
from jaxshard_magic.strategies.planned_collectives import planned_collectives
from jaxshard_magic.strategies.sharded_lowering import ShardedLowering
from jaxshard_magic.targets import Target

LIMIT = 0.1  # of the published step
LENGTH, HEAD, VOCABULARY = 2048, 128, 32_000
KEEPS = jax.checkpoint_policies.checkpoint_dots_with_no_batch_dims  # "minimal"
OVERLAP = (
    "--xla_tpu_enable_data_parallel_all_reduce_opt=true --xla_tpu_data_parallel_opt_different_sized_ops=true "
    "--xla_tpu_enable_async_collective_fusion=true --xla_tpu_enable_async_collective_fusion_fuse_all_gather=true "
    "--xla_tpu_enable_async_collective_fusion_multiple_steps=true --xla_tpu_overlap_compute_collective_tc=true "
    "--xla_enable_async_all_gather=true"
)
MORE = (
    " --xla_tpu_megacore_fusion_allow_ags=false --xla_enable_async_collective_permute=true "
    "--xla_tpu_enable_ag_backward_pipelining=true"
)
TABLES = "https://github.com/AI-Hypercomputer/maxtext/tree/main/MaxText/configs/"


@dataclass(frozen=True)
class Case:
    """`utilization`: model FLOPs over the peak, as published; `each`: texts a device; `keeps`: whether products with
    weights are kept for the backward pass, where all else is computed again."""

    name: str
    size: llama.Size
    chip: str
    extent: tuple[int, ...]
    strategy: str
    axes: Mapping[str, int]
    each: int
    utilization: float
    keeps: bool
    flags: str
    source: str

    @property
    def devices(self) -> int:
        count = 1
        for n in self.extent:
            count *= n
        return count

    @property
    def seconds(self) -> float:
        """What the published share makes of the step: MaxText counts the products with weights and the whole square of
        the attention's scores, three times each (`calculate_tflops_training_per_device`)."""
        s = self.size
        layer = s.width * (2 * s.heads + 2 * s.groups) * s.head + 3 * s.width * s.hidden
        weights = 2 * self.each * LENGTH * (s.layers * layer + s.width * s.vocabulary)
        scores = 4 * self.each * LENGTH**2 * s.heads * s.head * s.layers
        return 3 * (weights + scores) / (self.utilization * (chip(self.chip).peak("bfloat16") or 1))


@dataclass(frozen=True)
class Facts:
    """What a compiled step says that predictions are made of."""

    shares: tuple[DeviceWork, ...]
    leaves: tuple[Leaf, ...]
    collectives: tuple[Collective, ...]
    moves: tuple
    schedule: CollectiveSchedule | None


def _decoder(layers: int, width: int, heads: int, hidden: int) -> llama.Size:
    return llama.Size(layers, width, heads, heads, HEAD, hidden, VOCABULARY, 1e4)


B16, B32 = _decoder(32, 4096, 64, 28_672), _decoder(32, 8192, 64, 28_672)
B64, B128 = _decoder(64, 8192, 64, 28_672), _decoder(64, 8192, 128, 57_344)


def _v5e(name: str, size: llama.Size, each: int, utilization: float) -> Case:
    axes, source = {"data": 256}, TABLES + "v5e"
    return Case(name, size, "v5e", (16, 16), "fsdp", axes, each, utilization, False, OVERLAP, source)


def _v5p(name: str, size: llama.Size, last: int, model: int, each: int, utilization: float) -> Case:
    axes, source = {"data": 16 * last // model, "model": model}, TABLES + "v5p"
    extent = (4, 4, last)
    return Case(name, size, "v5p", extent, "fsdp+tp", axes, each, utilization, True, OVERLAP + MORE, source)


CASES = {
    "v5e-32b": _v5e("32B on v5e-256", B32, 4, 0.6686),
    "v5p-32b": _v5p("32B on v5p-128", B32, 4, 4, 6, 0.7147),
    "v5e-16b": _v5e("16B on v5e-256", B16, 6, 0.6110),
    "v5p-128b": _v5p("128B on v5p-256", B128, 8, 8, 1, 0.6868),
    "v5p-64b": _v5p("64B on v5p-128", B64, 4, 4, 3, 0.7031),
    "v5e-64b": _v5e("64B on v5e-256", B64, 2, 0.5990),
}


def facts(case: Case, compiled: bool) -> Facts:
    """What the plan of a case says, or, after minutes, its compiled program. Raises SystemExit where it has none."""
    mesh = " ".join(f"{axis}={n}" for axis, n in case.axes.items())
    extent = "x".join(map(str, case.extent))
    call = llama.call(case.size, case.each * case.devices, LENGTH, KEEPS if case.keeps else None)
    step = jaxshard_magic.shard(call.step, case.strategy, mesh=jaxshard_magic.mesh(f"{case.chip}:{extent} {mesh}"))
    if not compiled:
        plan = step.planned(*call.args).plan
        assert plan.shares is not None and isinstance(plan.run, ShardedLowering)
        sent = tuple(map(to_report_collective, planned_collectives(plan.run)))
        return Facts(plan.shares, leaves(plan.leaves, plan.mesh), sent, (), None)
    entry = step.prepare(*call.args)
    said = program_reading(entry)
    if said.collectives is None or entry.plan.shares is None:
        raise SystemExit(f"{case.name}: the compiler finds no room for it, and tells no order")
    moves = tuple(move for move, _ in said.hlo_collectives)
    return Facts(entry.plan.shares, said.leaves, said.collectives, moves, said.schedule)


def _on_chip(share: DeviceWork) -> DeviceWork:
    """Products of activations with activations as the published runs do them, in a kernel for attention: scores stay on
    the chip. It skips the half that the mask hides, and reaches about half of what large products do, so that the FLOPs
    stay as they are (Dao, "FlashAttention-2", 2023, table 4 and figure 5, has 50 to 73% of the peak)."""
    return share if share.weights else replace(share, bytes=0)


def predicted(case: Case, found: Facts) -> Roofline:
    """The step as a report predicts it under the compiler's options of the run."""
    os.environ["LIBTPU_INIT_ARGS"] = case.flags
    target = Target(chip(case.chip), case.extent)
    shares = tuple(map(_on_chip, found.shares))
    roof = roofline(target.chip, case.axes, shares, found.leaves, found.collectives, target, ("data",))
    told = None if found.schedule is None else with_schedule(roof, found.schedule, found.moves)
    return roof if told is None else told[0]


@contextmanager
def sustaining(share: float):
    """Predictions in which large products reach this share of a TPU's peak."""
    before = PEAK_SHARE["tpu"]
    PEAK_SHARE["tpu"] = share
    try:
        yield
    finally:
        PEAK_SHARE["tpu"] = before


def implied(case: Case, found: Facts) -> float:
    """The share of the peak with which the prediction is the published step."""
    low, high = 0.4, 1.2
    for _ in range(30):
        middle = (low + high) / 2
        with sustaining(middle):
            low, high = (middle, high) if (predicted(case, found).step or 0.0) > case.seconds else (low, middle)
    return low


def rows(known: Mapping[str, Facts]) -> tuple[list[tuple[str, ...]], float]:
    """A row for each case, and the largest error."""
    shares = {name: implied(CASES[name], found) for name, found in known.items()}
    made, worst = [], 0.0
    for name, found in known.items():
        case, own = CASES[name], predicted(CASES[name], found)
        others = [share for other, share in shares.items() if other != name] or [shares[name]]
        with sustaining(statistics.median(others)):
            left = predicted(case, found).step or 0.0
        step, low, high = own.step or 0.0, own.low or 0.0, own.high or 0.0
        worst = max(worst, abs(step / case.seconds - 1))
        made.append(
            (
                case.name,
                f"{case.seconds:.2f} s",
                f"{step:.2f} s",
                f"{100 * (step / case.seconds - 1):+.1f}%",
                f"{low:.2f} to {high:.2f} s" + ("" if low <= case.seconds <= high else " *"),
                f"{own.exposed or 0:.2f} of {own.total_link_seconds or 0:.2f} s",
                f"{statistics.median(others):.3f}: {100 * (left / case.seconds - 1):+.1f}%",
                f"{shares[name]:.3f}",
            )
        )
    return made, worst


@dataclass(frozen=True)
class Gather:
    """An all-gather of so many bytes over the axis `along` of a slice, and what it took."""

    name: str
    chip: str
    axes: Mapping[str, int]
    extent: tuple[int, ...]
    along: str
    size: int
    seconds: float


BOOK = "https://jax-ml.github.io/scaling-book/sharding/"  # pop quiz 2
GATHERS = (
    Gather("bf16[2048, 8192] over 4 of v5e 8x4", "v5e", {"x": 8, "y": 4}, (8, 4), "y", 2 * 2048 * 8192, 680e-6),
    Gather("bf16[256, 256] over 4 of v5e 8x4", "v5e", {"x": 8, "y": 4}, (8, 4), "y", 2 * 256 * 256, 8e-6),
)


def gathered(one: Gather) -> tuple[str, ...]:
    """A row: what a gather took, what it is predicted to take, and the error."""
    group = one.axes[one.along]
    sent = wire_bytes("all-gather", group, one.size)
    row = Collective("all-gather", (one.along,), group, 1, one.size, sent)
    roof = roofline(chip(one.chip), one.axes, (), (), [row], Target(chip(one.chip), one.extent))
    took = roof.total_link_seconds or 0.0
    error = f"{100 * (took / one.seconds - 1):+.1f}%"
    return one.name, f"{1e6 * one.seconds:.0f} us", f"{1e6 * took:.1f} us", error


HEADS = ("run", "published", "predicted", "error", "range", "exposed", "products' share by the others", "by itself")


def table(lines: Sequence[Sequence[str]], heads: Sequence[str] = HEADS) -> str:
    ruled = [heads, ["---"] * len(heads), *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=CASES, help="these cases; all unless said")
    parser.add_argument("--kept", type=Path, default=None, help="a folder in which compiled facts stay")
    parser.add_argument("--compile", action="store_true", help="compile each case: minutes, and not all have room")
    parser.add_argument("--here", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        name, file = given.here
        Path(file).write_bytes(pickle.dumps(facts(CASES[name], given.compile)))
        return 0
    folder = given.kept or Path(os.environ.get("TMPDIR", "/tmp")) / f"published-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    known = {}
    for name in given.only or CASES:
        file = folder / f"{name}-{'compiled' if given.compile else 'planned'}.pickle"
        if not file.exists():
            # The compiler's options are read when it is loaded, and what is kept of its programs does not know them.
            apart = {"LIBTPU_INIT_ARGS": CASES[name].flags, "XDG_CACHE_HOME": str(folder / name)}
            line = [sys.executable, __file__, "--here", name, str(file), *(["--compile"] * given.compile)]
            subprocess.run(line, check=True, env={**os.environ, **apart})
        known[name] = pickle.loads(file.read_bytes())
    lines, worst = rows(known)
    print(table(lines))
    print()
    print(table(list(map(gathered, GATHERS)), ("all-gather", "published", "predicted", "error")))
    return worst > LIMIT


if __name__ == "__main__":
    sys.exit(main())
