"""Predicted seconds of a pipeline's actions on a chip: the roofline of each stage's programs, and their collectives."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ..hardware import Chip
from ..links import AxisLink
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..report import Leaf
from ..schedule import Costs
from ..schedule.actions import KINDS
from ..targets import Target
from .collectives import merge
from .matmul_efficiency import LINK_SHARE
from .pipeline_memory import piece_bytes
from .pipeline_traffic import ProgramTraffic, sent_bytes
from .roofline import all_known, bandwidth_seconds, roofline, sum_known
from .stage_products import flops, products_by_pass, runs_per_step

# Seconds for the host to start an action: an empty action in benchmarks/bench_pipeline.py on 2 cores.
START = 36e-6


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a prediction.

    Attributes:
        figure: Figure of a stage's roofline for its products.
        link_factor: Factor on the collectives' time at full link bandwidth; 0 where communication is fully overlapped.
        start: Whether actions wait for the host to start them.
    """

    figure: Literal["ideal", "own", "slow"]
    link_factor: float
    start: bool


LOW, BEST, HIGH = (
    Assumptions("ideal", 0.0, False),
    Assumptions("own", 1.0, True),
    Assumptions("slow", 1 / LINK_SHARE, True),
)


def roofline_costs(
    pipeline: PipelineExecutor,
    chip: Chip,
    target: Target | None,
    said: Mapping[ProgramKey, ProgramTraffic],
    guess: Assumptions = BEST,
) -> Costs | None:
    """Return the seconds of each stage's actions on `chip`; None where a figure is unknown.

    Args:
        pipeline: The pipeline.
        chip: The chip.
        target: Slice or nodes of the mesh.
        said: Traffic of each program.
        guess: Assumptions of the prediction.
    """
    mesh = pipeline.ranks.mesh
    wires = roofline(chip, mesh.shape, None, (), (), target).wires
    way = wires[pipeline.ranks.axis].bandwidth
    if not way and len(pipeline.ranks) > 1:
        return None
    stages = range(len(pipeline.stages))
    passes = []
    for s in stages:
        times = all_known((*_own(pipeline, s, chip, target, guess), *_sent(pipeline, s, said, wires)))
        if times is None:
            return None
        passes.append([own + guess.link_factor * sent for own, sent in zip(times[:3], times[3:], strict=True)])
    transfer = [max(sent_bytes(pipeline, s)) / way if way else 0.0 for s in stages]
    forward, input_grad, weight_grad = zip(*passes, strict=True)
    if guess.start:
        # A whole backward pass is one action: its start counts once, with the weight gradients.
        forward, weight_grad = with_start(forward), with_start(weight_grad)
    return Costs(forward, input_grad, weight_grad, transfer)


def with_start(seconds: Sequence[float]) -> list[float]:
    """Return the seconds of actions with the host's time to start each."""
    return [each + START for each in seconds]


def flops_costs(pipeline: PipelineExecutor) -> Costs:
    """Return each stage's FLOPs of one microbatch, in units of the mean forward pass."""
    passes = [[flops(works) for works in products_by_pass(pipeline, s).values()] for s in range(len(pipeline.stages))]
    mean = fmean(forward for forward, _, _ in passes) or 1.0
    return Costs(*([count / mean for count in each] for each in zip(*passes, strict=True)))


def update_seconds(pipeline: PipelineExecutor, chip: Chip, leaves: Sequence[Leaf]) -> float:
    """Return the seconds of the update on the slowest rank.

    Parameters and optimizer state are read and written once, and gradients are read.

    Args:
        pipeline: The pipeline.
        chip: The chip.
        leaves: Arrays of the step, one per leaf of the pipeline.
    """
    times = [{"params": 3, "optimizer": 2}.get(row.role, 0) for row in leaves]
    moved = (
        sum(n * piece_bytes(pipeline, place, rank) for n, place in zip(times, pipeline.leaves, strict=True))
        for rank in range(len(pipeline.ranks))
    )
    return max(moved) / chip.hbm_bandwidth


def outside_seconds(
    pipeline: PipelineExecutor, chip: Chip, target: Target | None, said: Mapping[ProgramKey, ProgramTraffic]
) -> float | None:
    """Return the seconds of collectives before the first and after the last action; None where a figure is unknown.

    Sums of gradients over examples are among them. The result is the time of the slowest rank plus that of the update.

    Args:
        pipeline: The pipeline.
        chip: The chip.
        target: Slice or nodes of the mesh.
        said: Traffic of each program.
    """
    wires = roofline(chip, pipeline.ranks.mesh.shape, None, (), (), target).wires
    of_ranks, rest = defaultdict[int, float](float), 0.0
    for (kind, number), one in said.items():
        if kind in KINDS:
            continue
        taken = sum_known(_times(one, wires))
        if taken is None:
            return None
        if kind in ("prepare", "settle"):
            of_ranks[pipeline.rank_of((kind, number))] += taken
        else:
            rest += taken
    return max(of_ranks.values(), default=0.0) + rest


def weight_traffic_seconds(
    pipeline: PipelineExecutor,
    chip: Chip,
    target: Target | None,
    said: Mapping[ProgramKey, ProgramTraffic],
    batch_axes: Collection[str],
) -> tuple[float, ...] | None:
    """Return, per stage, the seconds of one microbatch that do not shrink with the microbatch; None where a figure is
    unknown.

    Counted are collectives over the batch axes: gathered weights and summed gradients.

    Args:
        pipeline: The pipeline.
        chip: The chip.
        target: Slice or nodes of the mesh.
        said: Traffic of each program.
        batch_axes: Mesh axes over which examples are sharded.
    """
    wires = roofline(chip, pipeline.ranks.mesh.shape, None, (), (), target).wires
    stages = range(len(pipeline.stages))
    each = all_known(sum_known(_sent(pipeline, s, said, wires, batch_axes)) for s in stages)
    return None if each is None else tuple(each)


def _own(
    pipeline: PipelineExecutor, s: int, chip: Chip, target: Target | None, guess: Assumptions
) -> list[float | None]:
    """Return the seconds of the products in a stage's forward pass, input gradients and weight gradients."""
    axes = pipeline.ranks.mesh.shape
    shares = ([share for _, share in works] for works in products_by_pass(pipeline, s).values())
    return [getattr(roofline(chip, axes, each, (), (), target), guess.figure) for each in shares]


def _sent(
    pipeline: PipelineExecutor,
    s: int,
    said: Mapping[ProgramKey, ProgramTraffic],
    wires: Mapping[str, AxisLink],
    over: Collection[str] | None = None,
) -> list[float | None]:
    """Return the seconds of collectives in the forward pass, input gradients and weight gradients, the mean over
    microbatches.

    `over` restricts the sum to collectives over no other axes.
    """
    runs, m = runs_per_step(pipeline), pipeline.split.schedule.microbatches

    def each(kind: str) -> Iterator[float | None]:
        for t in _times(said.get((kind, s), ProgramTraffic(())), wires, over):
            yield None if t is None else t * runs[kind, s] / m

    # The collectives of a whole backward pass (B) count as those of the weight gradients.
    return [sum_known(t for kind in kinds for t in each(kind)) for kinds in ("F", "I", "WB")]


def _times(
    one: ProgramTraffic, wires: Mapping[str, AxisLink], over: Collection[str] | None = None
) -> list[float | None]:
    """Return the seconds of the collectives in one run of a program, None for unknown ones."""
    rows = () if one.collectives is None else merge(one.collectives)
    among = (row for row in rows if over is None or (row.axes is not None and {*row.axes} <= {*over}))
    return [None] if one.collectives is None else [bandwidth_seconds(row, wires) for row in among]
