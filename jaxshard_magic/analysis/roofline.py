"""Predicted time of a step on a chip, from FLOPs, bytes and link bandwidths.

Each product takes the time of the roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual
Performance Model", 2009), at the share of the peak that its shape allows (`efficiency`). The part of communication not
hidden by compute is added.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TypeVar

from ..hardware import Chip
from ..links import AxisLink, axis_links, collective_latency
from ..plan import DeviceWork, Plan
from ..program.flops import total_work
from ..report import Collective, Leaf, PredictedWait, Timing
from ..report.device_leaves import leaves_on_fullest
from ..targets import Target
from .collectives import Cause, HloCollective, merge
from .overlap import CollectiveSchedule, exposed_times
from .throughput import ideal_seconds

Number = TypeVar("Number", int, float)

# Relative error of a predicted step, as observed for published runs (docs/predictions.md).
PREDICTION_ERROR = 0.10


# Operations between products (norms, activations, residuals, softmax) read and write the products' activations this
# many times more.
BETWEEN = 1.0
# Collectives that the compiler may start early, to run during products. TPU runs sums in place: programs compiled by
# libtpu 0.0.42 for v5e and v5p show this. XLA for GPUs starts nothing early by default.
ASYNC_KINDS = {"tpu": ("all-gather", "reduce-scatter", "collective-permute"), "gpu": ()}
# Collectives over the batch axes that the compiler combines into one: sums of gradients, read only by the update, and
# gathers of weights. TPU leaves gathers and scatters where they are.
COMBINED_KINDS = {"tpu": ("all-reduce",), "gpu": ("all-reduce", "all-gather", "reduce-scatter")}
# Share of each kind of collective that compute hides, by chip, from decoders and MLPs compiled by libtpu 0.0.42
# (benchmarks/bench_plans.py). On v4 and v5p gathers run where they are used, and nothing is hidden.
HIDDEN_SHARES = {
    "v5e": dict.fromkeys(ASYNC_KINDS["tpu"], 0.8),
    "v6e": dict.fromkeys(ASYNC_KINDS["tpu"], 0.25),
    "tpu7x": dict.fromkeys(ASYNC_KINDS["tpu"], 0.9),
}
# Share of the compute that can hide communication.
ROOM = 1 / 3
# This flag asks the compiler to hide more; MaxText sets it. With it, decoders of 16, 32 and 64B on 256 v5e hide 40, 46
# and 42% of their communication.
ASKED, WHERE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true", "LIBTPU_INIT_ARGS"
ASKED_HIDES = dict.fromkeys(ASYNC_KINDS["tpu"], 0.5)

# Share of the peak reached by large products.
# TPU: 95.6 ms computed, 96 ms measured on v2 (https://jax-ml.github.io/scaling-book/profiling/), and the share left by
# published runs, each predicted without itself (docs/predictions.md).
# GPU: 0.859 on A100 and 0.801 on H100, the best of all shapes ("Maximum Achievable Matmul FLOPS",
# https://github.com/stas00/ml-engineering/tree/master/compute/accelerator).
PEAK_SHARE = {"tpu": 0.95, "gpu": 0.80}
SLOWEST_PEAK_SHARE = {"tpu": 0.85, "gpu": 0.70}  # TPU: the slowest of those runs; GPU: lower by as much
# Rows and columns of a TPU's matrix unit; `USUAL_UNIT` for chips not listed.
UNIT = {"v6e": 256, "tpu7x": 256}
USUAL_UNIT = 128
ROWS = 8  # rows that enter the unit together, one per sublane
# Share of the published bandwidth reached by links: 560 us computed and 680 us measured
# (https://jax-ml.github.io/scaling-book/sharding/), 1.1 ms and 1.13 ms
# (https://jax-ml.github.io/scaling-book/profiling/).
LINK_SHARE = 0.9


def efficiency(chip: Chip, product: DeviceWork) -> float:
    """Return the share of a chip's peak reached by a product, 0 to 1.

    A TPU keeps a square of one operand in the matrix unit while rows of the other pass through. Dimensions are padded
    to full squares (https://jax-ml.github.io/scaling-book/tpus/, "How does a TPU work?"). The compiler chooses the
    stationary operand: the better choice is assumed.

    >>> from jaxshard_magic.hardware import chip
    >>> dims = [(512, 512, k) for k in (64, 128, 192)]
    >>> products = [DeviceWork(1, 1, "bfloat16", matrix_dims=d) for d in dims]
    >>> [round(efficiency(chip("v5e"), product) / 0.95, 3) for product in products]
    [0.5, 1.0, 0.75]
    """
    reached = PEAK_SHARE[chip.kind]
    if chip.kind == "tpu" and product.matrix_dims is not None and all(product.matrix_dims):
        unit = UNIT.get(chip.key, USUAL_UNIT)
        rows, columns, summed = product.matrix_dims
        held = max(_filled(rows, ROWS) * _filled(columns, unit), _filled(columns, ROWS) * _filled(rows, unit))
        reached *= held * _filled(summed, unit)
    return reached


def matmul_seconds(chip: Chip, product: DeviceWork) -> float | None:
    """Return the seconds of a product at the published peak; None without a published figure.

    A TPU computes a float32 product in several bfloat16 passes and takes as many times as long.
    """
    rate = chip.peak(product.dtype)
    passes = product.passes if chip.kind == "tpu" else 1
    return passes * product.flops / rate if rate else None


def _filled(size: int, unit: int) -> float:
    return size / (ceil(size / unit) * unit)


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device; None where a figure of the chip or of the program is unknown.

    Attributes:
        chip: The chip.
        wires: The link used by each mesh axis.
        compute: FLOPs over the chip's peak.
        memory: Bytes of products and of the update over the memory bandwidth.
        ideal: Sum over products, each the longer of compute and memory, plus the update.
        own: As `ideal`, at the efficiency of the products' shapes, plus the operations between products.
        slow: As `own`, with products at their lowest observed efficiency.
        waiting: Part of `own` spent waiting for memory.
        communication: Bytes sent over the links of each axis, at full bandwidth, added up.
        busiest: Part of `communication` on the axis with most.
        links: Per collective, the seconds on the links, at the bandwidth they reach and no less than the latency of the
            hops.
        exposed_seconds: Per collective, the seconds that the device waits.
        least: The whole step with everything hidden that the compiler may start early.
        overlap: Source of `exposed_seconds`: "scheduled" (order of the compiled program) or "by rule" (usual behavior
            of the compiler).
    """

    chip: Chip
    wires: Mapping[str, AxisLink]
    compute: float | None
    memory: float | None
    ideal: float | None
    own: float | None
    slow: float | None
    waiting: float | None
    communication: float | None
    busiest: float | None
    links: tuple[float | None, ...]
    exposed_seconds: tuple[float, ...] | None
    least: float | None
    overlap: str = "by rule"

    @property
    def total_link_seconds(self) -> float | None:
        """Seconds of all collectives on the links."""
        return None if self.communication is None else sum_known(self.links)

    @property
    def exposed(self) -> float | None:
        """Seconds that the device waits for collectives."""
        return None if self.exposed_seconds is None else sum(self.exposed_seconds)

    @property
    def step(self) -> float | None:
        """Best estimate of the whole step."""
        return sum_known((self.own, self.exposed))

    @property
    def low(self) -> float | None:
        """Lower bound of the whole step: products at the peak, and communication fully overlapped."""
        return None if self.ideal is None or self.busiest is None else max(self.ideal, self.busiest)

    @property
    def high(self) -> float | None:
        """Upper estimate of the whole step: nothing overlapped, products at their lowest observed efficiency."""
        return sum_known((self.slow, self.total_link_seconds))

    @property
    def bound(self) -> str | None:
        """Longest part of the step: compute, memory or communication."""
        if self.own is None or self.exposed is None or self.waiting is None:
            return None
        parts = {"compute": self.own - self.waiting, "memory": self.waiting, "communication": self.exposed}
        return max(parts, key=lambda part: parts[part])

    @property
    def bound_by_memory(self) -> float | None:
        """Share of `own` spent waiting for memory."""
        return None if not self.own or self.waiting is None else self.waiting / self.own


def roofline(
    chip: Chip,
    axes: Mapping[str, int],
    shares: Sequence[DeviceWork] | None,
    leaves: Iterable[Leaf],
    collectives: Iterable[Collective] | None,
    target: Target | None = None,
    batch_axes: Collection[str] = (),
) -> Roofline:
    """Return the roofline of a step; overlap is estimated by rule.

    Args:
        chip: The chip.
        axes: Sizes of the mesh axes, in the mesh's order.
        shares: Work of one device, by product; None where unknown.
        leaves: Arrays of the step.
        collectives: Collectives of the step; None where unknown.
        target: Slice or nodes of the mesh, where known.
        batch_axes: Mesh axes over which examples are sharded.
    """
    if target is None:
        wires = axis_links(chip, axes)
    elif chip.kind == "gpu":
        wires = axis_links(replace(chip, node=target.extent[1]), axes)
    else:
        wires = axis_links(chip, axes, target.extent)
    compute = memory = ideal = own = slow = waiting = None
    if shares is not None and all(chip.peak(s.dtype) and s.exact for s in shares):
        update = _update_bytes(leaves) / chip.hbm_bandwidth
        moved = [s.bytes / chip.hbm_bandwidth for s in shares]
        peak = [matmul_seconds(chip, s) or 0.0 for s in shares]
        sustained = [t / efficiency(chip, s) for t, s in zip(peak, shares, strict=True)]
        slowest = [t * PEAK_SHARE[chip.kind] / SLOWEST_PEAK_SHARE[chip.kind] for t in sustained]
        between = update + BETWEEN * sum(s.bytes - s.weights for s in shares) / chip.hbm_bandwidth
        compute, memory = sum(peak), sum(moved) + update
        ideal = sum(map(max, peak, moved)) + update
        own, slow = sum(map(max, sustained, moved)) + between, sum(map(max, slowest, moved)) + between
        waiting = sum(m for c, m in zip(sustained, moved, strict=True) if m > c) + between
    rows = None if collectives is None else list(collectives)
    times = None if rows is None else all_known(bandwidth_seconds(c, wires) for c in rows)
    links = () if rows is None else link_seconds(rows, chip, wires, batch_axes)
    if rows is None or times is None:
        return Roofline(chip, wires, compute, memory, ideal, own, slow, waiting, None, None, links, None, None)
    each = least = None
    if own is not None:
        timed = [(c.kind, t or 0.0) for c, t in zip(rows, links, strict=True)]
        each = _left(timed, *_hides(chip, own))
        least = own + sum(_left(timed, dict.fromkeys(ASYNC_KINDS[chip.kind], 1.0), own))
    busiest = max((sum(t for c, t in zip(rows, times, strict=True) if a in (c.axes or ())) for a in axes), default=0.0)
    return Roofline(chip, wires, compute, memory, ideal, own, slow, waiting, sum(times), busiest, links, each, least)


def _hides(chip: Chip, own: float) -> tuple[Mapping[str, float], float]:
    """Return the hidden share of each kind of collective, and the seconds of compute that can hide communication."""
    if chip.kind == "tpu" and ASKED in os.environ.get(WHERE, ""):
        return ASKED_HIDES, own
    return HIDDEN_SHARES.get(chip.key, {}), ROOM * own


def _left(timed: Sequence[tuple[str, float]], hides: Mapping[str, float], room: float) -> tuple[float, ...]:
    """Return the exposed seconds of collectives.

    Args:
        timed: Kind and seconds of each collective.
        hides: Hidden share of each kind.
        room: Most seconds hidden in all.
    """
    hidden = sum(seconds * hides.get(kind, 0.0) for kind, seconds in timed)
    # A step has only so much compute to hide communication behind.
    fits = min(1.0, room / hidden) if hidden else 0.0
    return tuple(seconds * (1.0 - fits * hides.get(kind, 0.0)) for kind, seconds in timed)


def with_schedule(
    roof: Roofline, schedule: CollectiveSchedule, moved: Sequence[tuple[HloCollective, Cause]]
) -> tuple[Roofline, tuple[Collective, ...]] | None:
    """Return the roofline and its collectives with overlap from the order of the compiled program.

    Args:
        roof: The roofline by rule.
        schedule: Order of the compiled program.
        moved: The collectives of the program, with their causes.

    Returns:
        The roofline, and the collectives with their times; None where a figure is unknown.
    """
    moves = [move for move, _ in moved]
    ran = None if roof.own is None else exposed_times(schedule, moves, roof.chip, roof.wires, roof.own, LINK_SHARE)
    if ran is None:
        return None
    rows = merge(moved, ran.link_seconds, ran.wait_seconds)
    links, each = tuple(c.seconds for c in rows), tuple(c.exposed or 0.0 for c in rows)
    return replace(roof, links=links, exposed_seconds=each, overlap="scheduled"), rows


def link_seconds(
    rows: Sequence[Collective], chip: Chip, wires: Mapping[str, AxisLink], batch_axes: Collection[str]
) -> tuple[float | None, ...]:
    """Return the seconds of each collective on the links; None for unknown ones.

    The links run at their sustained bandwidth, and no collective is faster than the latency of its hops. Collectives
    combined by the compiler (`COMBINED_KINDS`) pay that latency once.

    Args:
        rows: The collectives.
        chip: The chip.
        wires: The link used by each mesh axis.
        batch_axes: Mesh axes over which examples are sharded.
    """
    takes = [_takes(c, chip, wires, batch_axes) for c in rows]
    groups = defaultdict[tuple[str, tuple[str, ...] | None], list[int]](list)
    for k, c in enumerate(rows):
        if takes[k] is not None:
            groups[c.kind, c.axes].append(k)
    link_times: list[float | None] = [None] * len(rows)
    for members in groups.values():
        own = [told for k in members if (told := takes[k]) is not None]
        total_seconds, least = sum(seconds for seconds, _ in own), max(hops for _, hops in own)
        for k, (seconds, _) in zip(members, own, strict=True):
            # A group takes at least the latency of its hops once, shared in proportion.
            link_times[k] = seconds * max(1.0, least / total_seconds) if total_seconds else least / len(own)
    return tuple(link_times)


def _takes(
    c: Collective, chip: Chip, wires: Mapping[str, AxisLink], batch_axes: Collection[str]
) -> tuple[float, float] | None:
    """Return the seconds of a collective, among others of its kind and axes, and of its hops; None where unknown."""
    sends = bandwidth_seconds(c, wires)
    if sends is None or c.axes is None:
        return None
    hops = collective_latency(c.kind, [wires[a].sub_ring(c.group_size, c.apart) for a in c.axes])
    joined = c.kind in COMBINED_KINDS[chip.kind] and set(c.axes) <= set(batch_axes)
    return sends / LINK_SHARE if joined else max(sends / LINK_SHARE, c.count * hops), hops


def all_known(values: Iterable[Number | None]) -> list[Number] | None:
    """Return all values as a list; None where one is unknown."""
    every = list(values)
    return None if None in every else [value for value in every if value is not None]


def sum_known(values: Iterable[float | None]) -> float | None:
    """Return the sum of the values; None where one is unknown."""
    every = all_known(values)
    return None if every is None else sum(every)


def with_times(collectives: Sequence[Collective], roof: Roofline) -> tuple[Collective, ...]:
    """Return the collectives of a roofline with seconds on the links and exposed seconds.

    Args:
        collectives: The collectives given to `roofline`, in order.
        roof: The roofline.
    """
    each: Sequence[float | None] = roof.exposed_seconds or [None] * len(collectives)
    return tuple(
        replace(c, seconds=links, exposed=waits) for c, links, waits in zip(collectives, roof.links, each, strict=True)
    )


def bandwidth_seconds(c: Collective, wires: Mapping[str, AxisLink]) -> float | None:
    """Return the bytes sent by a device over the bandwidth of the slowest axis; None where unknown. Latency is left
    out."""
    if c.axes is None or not c.exact:
        return None
    rates = [wires[a].sub_ring(c.group_size, c.apart).bandwidth for a in c.axes]
    known = [rate for rate in rates if rate]
    return c.wire_bytes / min(known) if known and len(known) == len(rates) else None


def waits_by_axes(collectives: Iterable[Collective]) -> tuple[PredictedWait, ...]:
    """Return the exposed seconds of timed collectives, by kind and axes."""
    waits = defaultdict[tuple[str, tuple[str, ...]], float](float)
    for c in collectives:
        waits[c.kind, c.axes or ()] += c.exposed or 0.0
    return tuple(PredictedWait(kind, axes, seconds) for (kind, axes), seconds in waits.items() if seconds)


def timing(
    measured: Timing, plan: Plan, roof: Roofline | None, collectives: Iterable[Collective], attached: bool
) -> Timing:
    """Return `measured` with the FLOPs of the step and, for a known chip, the prediction.

    Args:
        measured: Measured times of the step.
        plan: The plan.
        roof: The roofline; None without a known chip.
        collectives: The timed collectives.
        attached: Whether the step ran on the chip of the roofline, so that MFU is defined.
    """
    work = total_work(plan.work)
    counted = replace(
        measured,
        flops=float(work.flops) if work.exact and not plan.uncounted_primitives else None,
        recomputed=float(work.recomputed) if work.exact and not plan.uncounted_primitives else None,
        device_flops=None if plan.shares is None else float(sum(s.flops for s in plan.shares)),
    )
    if roof is None:
        return counted
    return replace(
        counted,
        on=roof.chip.name,
        predicted_step_s=roof.step,
        bound=roof.bound,
        compute_s=roof.compute,
        memory_s=roof.memory,
        waiting_s=roof.waiting,
        communication_s=roof.total_link_seconds,
        predicted_low_s=roof.low,
        predicted_high_s=roof.high,
        exposed_s=roof.exposed,
        waits=waits_by_axes(collectives) if roof.exposed_seconds is not None else (),
        overlap=None if roof.exposed is None else roof.overlap,
        links={a: w.bandwidth for a, w in roof.wires.items() if w.bandwidth},
        ways={a: w.full_description for a, w in roof.wires.items() if plan.mesh.shape[a] > 1},
        mfu=_mfu(plan, roof.chip, measured) if attached and not plan.uncounted_primitives else None,
    )


def _mfu(plan: Plan, chip: Chip, measured: Timing) -> float | None:
    """Return the model FLOPs utilisation: seconds of the useful FLOPs at the chip's peak over the measured seconds."""
    if measured.step_s is None or not measured.step_s.median:
        return None
    ideal = ideal_seconds(plan, chip)
    return None if ideal is None else ideal / measured.step_s.median


def _update_bytes(leaves: Iterable[Leaf]) -> int:
    """Return the bytes read and written by the optimizer update on a device."""
    size = Counter[str]()
    for leaf in leaves_on_fullest(list(leaves)):
        size[leaf.role] += leaf.bytes_per_device
    # Parameters and optimizer state are read and written once, and the gradient is read; no product shares these
    # accesses.
    return 3 * size["params"] + 2 * size["optimizer"]
