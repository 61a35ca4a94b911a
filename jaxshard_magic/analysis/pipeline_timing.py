"""Time a pipeline: as measured, or as a range predicted for a chip.

The predicted seconds of an action are the roofline of its stage's programs, and their collectives.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..hardware import Chip
from ..links import AxisLink
from ..pipeline.executor import PipelineExecutor
from ..pipeline.jobs import ProgramKey
from ..pipeline.record import PipelineRun
from ..report import Leaf, Pipeline, PipelineEvent
from ..schedule import Costs, simulate
from ..schedule.actions import KINDS, entry_actions
from ..schedule.timeline import timeline
from ..targets import Target
from .collectives import merge
from .pipeline_facts import PipelineFacts
from .pipeline_memory import piece_bytes
from .pipeline_traffic import ProgramTraffic, sent_bytes
from .roofline import LINK_SHARE, all_known, bandwidth_seconds, roofline, sum_known
from .stage_products import flops, products_by_pass, runs_per_step

_Timelines = dict[str, tuple[PipelineRun | Costs | None, Pipeline]]
_timelines: "WeakKeyDictionary[CompiledStep, _Timelines]" = WeakKeyDictionary()

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


def _roofline_costs(
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


def _flops_costs(pipeline: PipelineExecutor) -> Costs:
    """Return each stage's FLOPs of one microbatch, in units of the mean forward pass."""
    passes = [[flops(works) for works in products_by_pass(pipeline, s).values()] for s in range(len(pipeline.stages))]
    mean = fmean(forward for forward, _, _ in passes) or 1.0
    return Costs(*([count / mean for count in each] for each in zip(*passes, strict=True)))


def _update_seconds(pipeline: PipelineExecutor, chip: Chip, leaves: Sequence[Leaf]) -> float:
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


def _outside_seconds(
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


class PipelineTiming(NamedTuple):
    """Timing of a pipeline.

    Attributes:
        shown: Pipeline as it ran, or as predicted for the chip represented by simulated devices.
        advised: Pipeline to base advice on; CPU times of simulated devices are never used for advice.
        seconds: Predicted seconds of a step on the chip: lower bound, best guess and upper bound; None where unknown.
        run: Measured run; None without one.
    """

    shown: Pipeline
    advised: Pipeline
    seconds: Sequence[float | None]
    run: PipelineRun | None = None


def time_pipeline(
    entry: CompiledStep,
    pipeline: PipelineExecutor,
    staged: PipelineFacts,
    leaves: Sequence[Leaf],
    *,
    recorded: PipelineRun | None,
    chip: Chip | None,
    target: Target | None,
    simulated: bool,
) -> PipelineTiming:
    """Time the pipeline of a compiled step by a measured run, or by prediction.

    Args:
        entry: Compiled step.
        pipeline: Pipeline of the step.
        staged: Facts read from the programs of the stages.
        leaves: Inputs of the step.
        recorded: Run recorded by the profiler; None uses a typical run timed by the pipeline, if any.
        chip: Chip to predict for; None predicts by FLOPs alone.
        target: Slice or nodes of the mesh; None for attached devices.
        simulated: True for simulated devices. The predictions for `chip` are shown instead of measured times.
    """
    schedule = pipeline.split.schedule
    costs: Costs | None = None
    seconds: Sequence[float | None] = (None, None, None)
    if chip is not None:
        guesses = LOW, BEST, HIGH
        all_costs = [_roofline_costs(pipeline, chip, target, staged.traffic, guess) for guess in guesses]
        update = _update_seconds(pipeline, chip, leaves)
        around = _outside_seconds(pipeline, chip, target, staged.traffic)
        costs = all_costs[1]
        seconds = tuple(
            sum_known([its and simulate(schedule, its).makespan, update, around and guess.link_factor * around])
            for its, guess in zip(all_costs, guesses, strict=True)
        )
    run = recorded or pipeline.median_run

    def predicted() -> Pipeline:
        return timeline(schedule, costs or _flops_costs(pipeline), "" if costs is None else "s")

    def cached(how: str, key: PipelineRun | Costs | None, made: Callable[[], Pipeline]) -> Pipeline:
        # Simulating all alternatives takes about half a second: kept until the costs change.
        known = _timelines.setdefault(entry, {})
        if how not in known or known[how][0] != key:
            known[how] = key, with_model_parts(made(), staged.holds, staged.devices, staged.activation_bytes)
        return known[how][1]

    # Simulated devices run on the CPU, and its times say nothing about the chip.
    if run is None or (simulated and costs is not None):
        shown = cached("predicted", costs, predicted)
        return PipelineTiming(shown, shown, seconds)
    shown = cached("measured", run, lambda: measured_pipeline(run, staged.split, staged.same_programs))
    if recorded is not None:
        shown = replace(shown, recorded=True)
    return PipelineTiming(shown, cached("predicted", costs, predicted) if simulated else shown, seconds, run)


def measured_pipeline(
    run: PipelineRun, split: Sequence[float] | None = None, alike: Sequence[Hashable] | None = None
) -> Pipeline:
    """Return the measurements of `run` next to the prediction from its costs and the ideal of even stages.

    Args:
        run: A timed run.
        split: Per stage, the share of a whole backward pass spent on the input gradient; see the costs of a run.
        alike: Per stage, a key equal for stages with the same programs; see the costs of a run.

    Raises:
        ShardError: The run was not timed to its end.
    """
    predicted = timeline(run.schedule, run.costs(split, alike), "s")
    makespan = run.makespan
    ranks = tuple(
        replace(rank, bubble=1 - work / makespan if makespan else 0.0, peak_activations=peak, work=work)
        for rank, work, peak in zip(predicted.ranks, run.busy_seconds, run.peaks, strict=True)
    )
    return replace(
        predicted,
        source="measured",
        bubble=replace(predicted.bubble, measured=run.bubble()),
        makespan=(*predicted.makespan[:2], makespan),
        ranks=ranks,
        events=tuple(_events(run)),
    )


def with_model_parts(
    pipeline: Pipeline, holds: Sequence[str], devices: Sequence[tuple[int, ...]], activation_bytes: Sequence[int | None]
) -> Pipeline:
    """Return `pipeline` with a description of each rank.

    Args:
        pipeline: The pipeline part of a report.
        holds: Per rank, its part of the model: "wte, blocks 0-3".
        devices: Per rank, the ids of its devices.
        activation_bytes: Per rank, the bytes of activations on one device at their peak.
    """
    ranks = tuple(
        replace(rank, holds=what, devices=ids, activation_bytes=size)
        for rank, what, ids, size in zip(pipeline.ranks, holds, devices, activation_bytes, strict=True)
    )
    return replace(pipeline, ranks=ranks)


def _events(run: PipelineRun) -> Iterator[PipelineEvent]:
    """Yield the events, timed from the first start."""
    first, ran = run.start, {event.action: event for event in run.events}
    for rank, row in enumerate(run.schedule.grid):
        for step in row:
            # The parts of a fused action become one event, as in the ideal schedule.
            if own := [ran[str(part)] for part in entry_actions(step) if str(part) in ran]:
                start, end = min(event.start for event in own), max(event.end for event in own)
                yield PipelineEvent(rank, str(step), start - first, end - first)
