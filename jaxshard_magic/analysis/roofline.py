"""What a step would take on a chip, from its FLOPs, its bytes and what its links carry.

The roofline of Williams, Waterman and Patterson ("Roofline: An Insightful Visual Performance Model", 2009) for each
product, at the share of the peak that its shape allows, and after it what of the collectives nothing hides.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..hardware import Chip
from ..plan import Plan, Share
from ..program.flops import totals
from ..report import Collective, Leaf, Timing
from ..report.held import on_fullest
from ..targets import Target
from ..wires import Wire, axis_bandwidths, latency
from .efficiency import LINKS, seconds_of

Number = TypeVar("Number", int, float)


# What a TPU's compiler may start ahead of its use, so that it runs beside products; sums it does where they stand. Seen
# in the programs of v5e, v5p and v6e that libtpu 0.0.42 makes. XLA for GPUs moves nothing ahead unless told to.
AHEAD = {"tpu": ("all-gather", "reduce-scatter", "collective-permute"), "gpu": ()}


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device; None where a figure of the chip or of the program is not known.

    `compute`: FLOPs over the chip's peak. `memory`: the bytes of products and of the update over the memory's
    bandwidth. `ideal`: the sum of products, each as long as the longer of its two, and the update; `own`: the same at
    the efficiency that the shapes of the products allow, of which `waiting` waits for the memory. `communication`: what
    is sent over each axis' links at their bandwidth, `busiest` on the axis that has most; `sent`: the same with what
    links reach of it and with the hops, `exposed` of it the device waits for. `overlap` says how that is known:
    "scheduled", from the order of the compiled program, or "by rule", as a compiler usually does.
    """

    chip: Chip
    wires: Mapping[str, Wire]
    compute: float | None
    memory: float | None
    ideal: float | None
    own: float | None
    waiting: float | None
    communication: float | None
    busiest: float | None
    sent: float | None
    exposed: float | None
    overlap: str = "by rule"

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
        """The whole step, nothing overlapped."""
        return total((self.own, self.sent))

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
) -> Roofline:
    """The roofline of a step on a mesh of `chip` with these `axes` (sizes, in the mesh's order); `target`: the slice
    or the nodes that it is made of, where they are known. What overlaps is told by rule."""
    if target is None:
        wires = axis_bandwidths(chip, axes)
    elif chip.kind == "gpu":
        wires = axis_bandwidths(replace(chip, node=target.extent[1]), axes)
    else:
        wires = axis_bandwidths(chip, axes, target.extent)
    compute = memory = ideal = own = waiting = None
    if shares is not None and all(chip.peak(s.dtype) and s.exact for s in shares):
        update = _update_bytes(leaves) / chip.hbm_bandwidth
        moved = [s.bytes / chip.hbm_bandwidth for s in shares]
        least = [seconds_of(chip, s, ideal=True) or 0.0 for s in shares]
        takes = [seconds_of(chip, s) or 0.0 for s in shares]
        compute, memory = sum(least), sum(moved) + update
        ideal = sum(map(max, least, moved)) + update
        own = sum(map(max, takes, moved)) + update
        waiting = sum(m for c, m in zip(takes, moved, strict=True) if m > c) + update
    rows = None if collectives is None else list(collectives)
    times = None if rows is None else known(seconds(c, wires) for c in rows)
    if rows is None or times is None:
        return Roofline(chip, wires, compute, memory, ideal, own, waiting, None, None, None, None)
    groups = _groups(rows, times, wires)
    ahead = sum(t for (kind, _), t in groups.items() if kind in AHEAD[chip.kind])
    sent = sum(groups.values())
    exposed = None if own is None else sent - min(ahead, own)
    busiest = max(
        (sum(t for c, t in zip(rows, times, strict=True) if a in (c.axes or ())) for a in axes), default=0.0
    )
    return Roofline(chip, wires, compute, memory, ideal, own, waiting, sum(times), busiest, sent, exposed)


def _groups(
    rows: Sequence[Collective], times: Sequence[float], wires: Mapping[str, Wire]
) -> dict[tuple[str, tuple[str, ...]], float]:
    """Seconds of the collectives by kind and axes, at what links reach of their bandwidth; at least the hops of those
    that run most often, as a compiler puts small ones of a kind together."""
    sizes, counts = (
        defaultdict[tuple[str, tuple[str, ...]], float](float),
        Counter[tuple[str, tuple[str, ...]]](),
    )
    for c, seconds in zip(rows, times, strict=True):
        key = c.kind, c.axes or ()
        sizes[key] += seconds / LINKS
        counts[key] = max(counts[key], c.count)
    return {
        (kind, axes): max(size, counts[kind, axes] * latency(kind, [wires[a] for a in axes]))
        for (kind, axes), size in sizes.items()
    }


def known(values: Iterable[Number | None]) -> list[Number] | None:
    """All of the values; None where one of them is not known."""
    every = list(values)
    return None if None in every else [value for value in every if value is not None]


def total(values: Iterable[float | None]) -> float | None:
    """The sum of the values; None where one of them is not known."""
    every = known(values)
    return None if every is None else sum(every)


def with_seconds(collectives: Iterable[Collective], wires: Mapping[str, Wire]) -> tuple[Collective, ...]:
    """The collectives with the time that they take on these wires; None where it is not known."""
    return tuple(replace(c, seconds=seconds(c, wires)) for c in collectives)


def seconds(c: Collective, wires: Mapping[str, Wire]) -> float | None:
    """What a device sends over the bandwidth of the slowest axis that it goes along; latency is left out."""
    if c.axes is None or not c.exact:
        return None
    rates = [wires[a].bandwidth for a in c.axes]
    known = [rate for rate in rates if rate]
    return c.wire_bytes / min(known) if known and len(known) == len(rates) else None


def timing(measured: Timing, plan: Plan, roof: Roofline | None, attached: bool) -> Timing:
    """`measured` with the step's FLOPs and, where a chip is known, the prediction for it.

    `attached`: the step ran on that chip, so that its share of the chip's peak can be told.
    """
    work, devices = totals(plan.work), plan.mesh.size
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
        communication_s=roof.communication,
        predicted_low_s=roof.low,
        predicted_high_s=roof.high,
        exposed_s=roof.exposed,
        overlap=None if roof.exposed is None else roof.overlap,
        links={a: w.bandwidth for a, w in roof.wires.items() if w.bandwidth},
        ways={a: w.way for a, w in roof.wires.items() if plan.mesh.shape[a] > 1},
        mfu=_mfu(plan, roof.chip, devices, measured) if attached and not plan.unseen else None,
    )


def _mfu(plan: Plan, chip: Chip, devices: int, measured: Timing) -> float | None:
    """Model FLOPs utilisation: the time that the useful FLOPs would take at the chip's peak over the measured one
    (Chowdhery et al., "PaLM", 2022, appendix B)."""
    if measured.step_s is None or not measured.step_s.median:
        return None
    ideal = 0.0
    for w in plan.work:
        rate = chip.peak(w.dtype)
        if rate is None or not w.exact:
            return None
        ideal += 0.0 if w.recomputed else w.flops / rate / devices
    return ideal / measured.step_s.median


def _update_bytes(leaves: Iterable[Leaf]) -> int:
    """Parameters and optimizer state are read and written once, and the gradient is read: no product shares that."""
    size = Counter[str]()
    for leaf in on_fullest(list(leaves)):
        size[leaf.role] += leaf.bytes_per_device
    return 3 * size["params"] + 2 * size["optimizer"]
