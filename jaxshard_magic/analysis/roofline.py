"""What a step would take on a chip, from its FLOPs, its bytes and what its links carry.

The roofline of Williams, Waterman and Patterson ("Roofline: An Insightful Visual Performance Model", 2009) for each
product, at the share of the peak that its shape allows, and after it what of the collectives nothing hides.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..hardware import Chip
from ..plan import Plan, Share
from ..program.flops import totals
from ..report import Collective, Leaf, Timing, Wait
from ..report.held import on_fullest
from ..targets import Target
from ..wires import Wire, axis_bandwidths, latency
from .collectives import Cause, Move, merge
from .efficiency import LINKS, SLOWEST, SUSTAINED, efficiency, seconds_of
from .overlap import Schedule, exposed
from .throughput import ideal_seconds

Number = TypeVar("Number", int, float)

ERROR = 0.10  # of a predicted step: steps that were published and predicted differ by so much (docs/predictions.md)


# What lies between products (norms, activations, residuals, softmax) reads and writes their activations once more.
BETWEEN = 1.0
# What a TPU's compiler may start ahead of its use, so that it runs beside products; sums it does where they stand, as
# programs that libtpu 0.0.42 makes for v5e and v5p show. XLA for GPUs moves nothing ahead unless told to.
AHEAD = {"tpu": ("all-gather", "reduce-scatter", "collective-permute"), "gpu": ()}
# What a compiler sends as one where it moves over the axes of the batch, gradients that only the update waits for and
# weights: a TPU's leaves gathers and scatters where they are.
JOINS = {"tpu": ("all-reduce",), "gpu": ("all-reduce", "all-gather", "reduce-scatter")}
# The shares of it that programs hide, by chip, as those of decoders and MLPs show that libtpu 0.0.42 makes
# (benchmarks/bench_plans.py): on v4 and v5p gathers stand where they are used. ROOM: of the compute beside them.
HIDES = {
    "v5e": dict.fromkeys(AHEAD["tpu"], 0.8),
    "v6e": dict.fromkeys(AHEAD["tpu"], 0.25),
    "tpu7x": dict.fromkeys(AHEAD["tpu"], 0.9),
}
ROOM = 1 / 3
# Where the compiler is asked for more, as MaxText asks: of all that decoders of 16, 32 and 64B send on 256 v5e their
# programs hide 40, 46 and 42%.
ASKED, WHERE = "xla_tpu_enable_async_collective_fusion_fuse_all_gather=true", "LIBTPU_INIT_ARGS"
ASKED_HIDES = dict.fromkeys(AHEAD["tpu"], 0.5)


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device; None where a figure of the chip or of the program is not known.

    `compute`: FLOPs over the chip's peak. `memory`: the bytes of products and of the update over the memory's
    bandwidth. `ideal`: the sum of products, each as long as the longer of its two, and the update. `own`: the same at
    the efficiency that the shapes of the products allow, with what lies between them; of it `waiting` waits for the
    memory; `slow`: the same where products reach least. `communication`: what is sent over each axis' links at their
    bandwidth, `busiest` on the axis that has most. `links`: of each collective the seconds that it is on the links, at
    what they reach of their bandwidth and no faster than its hops; `each`: of each those that the device waits for.
    `least`: the whole step where a compiler hides all that it may start ahead. `overlap` says how `each` is known:
    "scheduled", from the order of the compiled program, or "by rule", as a compiler usually does.
    """

    chip: Chip
    wires: Mapping[str, Wire]
    compute: float | None
    memory: float | None
    ideal: float | None
    own: float | None
    slow: float | None
    waiting: float | None
    communication: float | None
    busiest: float | None
    links: tuple[float | None, ...]
    each: tuple[float, ...] | None
    least: float | None
    overlap: str = "by rule"

    @property
    def sent(self) -> float | None:
        """What all collectives are on the links."""
        return None if self.communication is None else total(self.links)

    @property
    def exposed(self) -> float | None:
        """What the device waits for all collectives."""
        return None if self.each is None else sum(self.each)

    @property
    def step(self) -> float | None:
        """The whole step, as it is guessed best."""
        return total((self.own, self.exposed))

    @property
    def low(self) -> float | None:
        """The whole step where products reach the peak and all that can be overlaps."""
        return None if self.ideal is None or self.busiest is None else max(self.ideal, self.busiest)

    @property
    def high(self) -> float | None:
        """The whole step, nothing overlapped, and products as far from the peak as they were seen."""
        return total((self.slow, self.sent))

    @property
    def bound(self) -> str | None:
        """compute, memory or communication: what takes longest."""
        if self.own is None or self.exposed is None or self.waiting is None:
            return None
        parts = {"compute": self.own - self.waiting, "memory": self.waiting, "communication": self.exposed}
        return max(parts, key=lambda part: parts[part])

    @property
    def bound_by_memory(self) -> float | None:
        """The share of `own` that waits for the memory."""
        return None if not self.own or self.waiting is None else self.waiting / self.own


def roofline(
    chip: Chip,
    axes: Mapping[str, int],
    shares: Sequence[Share] | None,
    leaves: Iterable[Leaf],
    collectives: Iterable[Collective] | None,
    target: Target | None = None,
    batch_axes: Collection[str] = (),
) -> Roofline:
    """The roofline of a step on a mesh of `chip` with these `axes` (sizes, in the mesh's order), of which `batch_axes`
    divide the examples; `target`: the slice or the nodes that it is made of, where they are known. What overlaps is
    told by rule."""
    if target is None:
        wires = axis_bandwidths(chip, axes)
    elif chip.kind == "gpu":
        wires = axis_bandwidths(replace(chip, node=target.extent[1]), axes)
    else:
        wires = axis_bandwidths(chip, axes, target.extent)
    compute = memory = ideal = own = slow = waiting = None
    if shares is not None and all(chip.peak(s.dtype) and s.exact for s in shares):
        update = _update_bytes(leaves) / chip.hbm_bandwidth
        moved = [s.bytes / chip.hbm_bandwidth for s in shares]
        peak = [seconds_of(chip, s) or 0.0 for s in shares]
        takes = [t / efficiency(chip, s) for t, s in zip(peak, shares, strict=True)]
        longest = [t * SUSTAINED[chip.kind] / SLOWEST[chip.kind] for t in takes]
        rest = update + BETWEEN * sum(s.bytes - s.weights for s in shares) / chip.hbm_bandwidth
        compute, memory = sum(peak), sum(moved) + update
        ideal = sum(map(max, peak, moved)) + update
        own, slow = sum(map(max, takes, moved)) + rest, sum(map(max, longest, moved)) + rest
        waiting = sum(m for c, m in zip(takes, moved, strict=True) if m > c) + rest
    rows = None if collectives is None else list(collectives)
    times = None if rows is None else known(seconds(c, wires) for c in rows)
    links = () if rows is None else on_links(rows, chip, wires, batch_axes)
    if rows is None or times is None:
        return Roofline(
            chip, wires, compute, memory, ideal, own, slow, waiting, None, None, links, None, None
        )
    each = least = None
    if own is not None:
        timed = [(c.kind, t or 0.0) for c, t in zip(rows, links, strict=True)]
        each = _left(timed, *_hides(chip, own))
        least = own + sum(_left(timed, dict.fromkeys(AHEAD[chip.kind], 1.0), own))
    busiest = max(
        (sum(t for c, t in zip(rows, times, strict=True) if a in (c.axes or ())) for a in axes), default=0.0
    )
    return Roofline(
        chip, wires, compute, memory, ideal, own, slow, waiting, sum(times), busiest, links, each, least
    )


def _hides(chip: Chip, own: float) -> tuple[Mapping[str, float], float]:
    """The share of each kind of collective that a program for the chip hides, and the seconds of compute that do so."""
    if chip.kind == "tpu" and ASKED in os.environ.get(WHERE, ""):
        return ASKED_HIDES, own
    return HIDES.get(chip.key, {}), ROOM * own


def _left(timed: Sequence[tuple[str, float]], hides: Mapping[str, float], room: float) -> tuple[float, ...]:
    """What is left to wait for of kinds and their seconds where these shares of each kind are hidden, by no more than
    `room` seconds."""
    hidden = sum(seconds * hides.get(kind, 0.0) for kind, seconds in timed)
    fits = min(1.0, room / hidden) if hidden else 0.0
    return tuple(seconds * (1.0 - fits * hides.get(kind, 0.0)) for kind, seconds in timed)


def in_order(
    roof: Roofline, schedule: Schedule, moved: Sequence[tuple[Move, Cause]]
) -> tuple[Roofline, tuple[Collective, ...]] | None:
    """The roofline with what the order of the compiled program tells, and the collectives that it is of then, with
    their times; None where a figure is not known."""
    moves = [move for move, _ in moved]
    ran = None if roof.own is None else exposed(schedule, moves, roof.chip, roof.wires, roof.own, LINKS)
    if ran is None:
        return None
    rows = merge(moved, ran.takes, ran.waits)
    links, each = tuple(c.seconds for c in rows), tuple(c.exposed or 0.0 for c in rows)
    return replace(roof, links=links, each=each, overlap="scheduled"), rows


def on_links(
    rows: Sequence[Collective], chip: Chip, wires: Mapping[str, Wire], batch_axes: Collection[str]
) -> tuple[float | None, ...]:
    """Seconds that each collective is on the links, at what they reach of their bandwidth and no faster than its hops;
    of those that a compiler sends as one (`JOINS`) the hops count once. None where it is not known."""
    takes = [_takes(c, chip, wires, batch_axes) for c in rows]
    groups = defaultdict[tuple[str, tuple[str, ...] | None], list[int]](list)
    for k, c in enumerate(rows):
        if takes[k] is not None:
            groups[c.kind, c.axes].append(k)
    found: list[float | None] = [None] * len(rows)
    for alike in groups.values():
        own = [told for k in alike if (told := takes[k]) is not None]
        whole, least = sum(seconds for seconds, _ in own), max(hops for _, hops in own)
        for k, (seconds, _) in zip(alike, own, strict=True):
            found[k] = seconds * max(1.0, least / whole) if whole else least / len(own)
    return tuple(found)


def _takes(
    c: Collective, chip: Chip, wires: Mapping[str, Wire], batch_axes: Collection[str]
) -> tuple[float, float] | None:
    """Seconds of a collective among those of its kind over its axes, and of its hops; None where it is not known."""
    sends = seconds(c, wires)
    if sends is None or c.axes is None:
        return None
    hops = latency(c.kind, [wires[a].part(c.group_size, c.apart) for a in c.axes])
    joined = c.kind in JOINS[chip.kind] and set(c.axes) <= set(batch_axes)
    return sends / LINKS if joined else max(sends / LINKS, c.count * hops), hops


def known(values: Iterable[Number | None]) -> list[Number] | None:
    """All of the values; None where one of them is not known."""
    every = list(values)
    return None if None in every else [value for value in every if value is not None]


def total(values: Iterable[float | None]) -> float | None:
    """The sum of the values; None where one of them is not known."""
    every = known(values)
    return None if every is None else sum(every)


def timed(collectives: Sequence[Collective], roof: Roofline) -> tuple[Collective, ...]:
    """The collectives that the roofline is of, with the seconds that each is on the links and that are waited for."""
    each: Sequence[float | None] = roof.each or [None] * len(collectives)
    return tuple(
        replace(c, seconds=links, exposed=waits)
        for c, links, waits in zip(collectives, roof.links, each, strict=True)
    )


def seconds(c: Collective, wires: Mapping[str, Wire]) -> float | None:
    """What a device sends over the bandwidth of the slowest axis that it goes along; latency is left out."""
    if c.axes is None or not c.exact:
        return None
    rates = [wires[a].part(c.group_size, c.apart).bandwidth for a in c.axes]
    known = [rate for rate in rates if rate]
    return c.wire_bytes / min(known) if known and len(known) == len(rates) else None


def waits_of(collectives: Iterable[Collective]) -> tuple[Wait, ...]:
    """What a device waits for collectives that are timed, by kind and axes."""
    waits = defaultdict[tuple[str, tuple[str, ...]], float](float)
    for c in collectives:
        waits[c.kind, c.axes or ()] += c.exposed or 0.0
    return tuple(Wait(kind, axes, seconds) for (kind, axes), seconds in waits.items() if seconds)


def timing(
    measured: Timing,
    plan: Plan,
    roof: Roofline | None,
    collectives: Iterable[Collective],
    attached: bool,
) -> Timing:
    """`measured` with the step's FLOPs and, where a chip is known, the prediction for it and the timed `collectives`.

    `attached`: the step ran on that chip, so that its share of the chip's peak can be told.
    """
    work = totals(plan.work)
    counted = replace(
        measured,
        flops=float(work.flops) if work.exact and not plan.unseen else None,
        recomputed=float(work.recomputed) if work.exact and not plan.unseen else None,
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
        communication_s=roof.sent,
        predicted_low_s=roof.low,
        predicted_high_s=roof.high,
        exposed_s=roof.exposed,
        waits=waits_of(collectives) if roof.each is not None else (),
        overlap=None if roof.exposed is None else roof.overlap,
        links={a: w.bandwidth for a, w in roof.wires.items() if w.bandwidth},
        ways={a: w.way for a, w in roof.wires.items() if plan.mesh.shape[a] > 1},
        mfu=_mfu(plan, roof.chip, measured) if attached and not plan.unseen else None,
    )


def _mfu(plan: Plan, chip: Chip, measured: Timing) -> float | None:
    """Model FLOPs utilisation: the time that the useful FLOPs would take at the chip's peak over the measured one."""
    if measured.step_s is None or not measured.step_s.median:
        return None
    ideal = ideal_seconds(plan, chip)
    return None if ideal is None else ideal / measured.step_s.median


def _update_bytes(leaves: Iterable[Leaf]) -> int:
    """Parameters and optimizer state are read and written once, and the gradient is read: no product shares that."""
    size = Counter[str]()
    for leaf in on_fullest(list(leaves)):
        size[leaf.role] += leaf.bytes_per_device
    return 3 * size["params"] + 2 * size["optimizer"]
