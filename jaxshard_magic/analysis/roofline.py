"""What a step would take on a chip, from its FLOPs, its bytes and what its links carry.

The roofline of Williams, Waterman and Patterson ("Roofline: An Insightful Visual Performance Model", 2009) for each
product, and after it the collectives, as if nothing overlapped.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..hardware import Chip
from ..plan import Plan, Share
from ..program.flops import totals
from ..report import Collective, Leaf, Timing
from ..report.held import on_fullest
from ..targets import Target
from ..wires import Wire, axis_bandwidths

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device; None where a figure of the chip or of the program is not known.

    `compute`: FLOPs over the chip's peak. `memory`: the bytes of products and of the update over the memory's
    bandwidth. `own`: the sum of products, each as long as the longer of its two, and the update. `communication`: what
    is sent over each axis' links. `bound_by_memory`: the share of `own` that waits for the memory.
    """

    chip: Chip
    wires: Mapping[str, Wire]
    compute: float | None
    memory: float | None
    own: float | None
    communication: float | None
    bound_by_memory: float | None

    @property
    def step(self) -> float | None:
        """The whole step, nothing overlapped."""
        return None if self.own is None or self.communication is None else self.own + self.communication

    @property
    def bound(self) -> str | None:
        """compute, memory or communication: what takes longest."""
        if self.own is None or self.communication is None or self.bound_by_memory is None:
            return None
        waits = self.bound_by_memory * self.own
        parts = {"compute": self.own - waits, "memory": waits, "communication": self.communication}
        return max(parts, key=lambda part: parts[part])

    @property
    def waiting(self) -> float | None:
        """The seconds of `own` that wait for the memory."""
        return None if self.own is None or self.bound_by_memory is None else self.bound_by_memory * self.own


def roofline(
    chip: Chip,
    axes: Mapping[str, int],
    shares: Sequence[Share] | None,
    leaves: Iterable[Leaf],
    collectives: Iterable[Collective] | None,
    target: Target | None = None,
) -> Roofline:
    """The roofline of a step on a mesh of `chip` with these `axes` (sizes, in the mesh's order); `target`: the slice
    or the nodes that it is made of, where they are known."""
    if target is None:
        wires = axis_bandwidths(chip, axes)
    elif chip.kind == "gpu":
        wires = axis_bandwidths(replace(chip, node=target.extent[1]), axes)
    else:
        wires = axis_bandwidths(chip, axes, target.extent)
    compute = memory = own = waiting = None
    rates = {share.dtype: chip.peak(share.dtype) for share in shares or ()}
    if shares is not None and all(rates.values()) and all(share.exact for share in shares):
        pairs = [(s.flops / (rates[s.dtype] or 1), s.bytes / chip.hbm_bandwidth) for s in shares]
        update = _update_bytes(leaves) / chip.hbm_bandwidth
        compute, memory = sum(c for c, _ in pairs), sum(m for _, m in pairs) + update
        own = sum(max(pair) for pair in pairs) + update
        slow = sum(m for c, m in pairs if m > c) + update
        waiting = slow / own if own else None
    communication = None if collectives is None else total(seconds(c, wires) for c in collectives)
    return Roofline(chip, wires, compute, memory, own, communication, waiting)


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
    rates = [wires[a].rate(c.group_size, c.apart) for a in c.axes]
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
        links={a: w.bandwidth for a, w in roof.wires.items() if w.bandwidth},
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
