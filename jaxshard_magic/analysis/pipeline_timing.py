"""Time a pipeline: as measured, or as a range predicted for a chip."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..compilation.compiled_step import CompiledStep
from ..hardware import Chip
from ..pipeline.executor import PipelineExecutor
from ..pipeline.record import PipelineRun
from ..report import Leaf, Pipeline, PipelineEvent
from ..report import Pipeline as PipelineReport
from ..schedule import Costs, simulate
from ..schedule.actions import entry_actions
from ..schedule.timeline import timeline
from ..targets import Target
from .pipeline_costs import BEST, HIGH, LOW, flops_costs, outside_seconds, roofline_costs, update_seconds
from .pipeline_facts import PipelineFacts
from .roofline import sum_known

_Timelines = dict[str, tuple[PipelineRun | Costs | None, PipelineReport]]
_timelines: "WeakKeyDictionary[CompiledStep, _Timelines]" = WeakKeyDictionary()


class PipelineTiming(NamedTuple):
    """Timing of a pipeline.

    Attributes:
        shown: Pipeline as it ran, or as predicted for the chip represented by simulated devices.
        advised: Pipeline to base advice on; CPU times of simulated devices are never used for advice.
        seconds: Predicted seconds of a step on the chip: lower bound, best guess and upper bound; None where unknown.
        run: Measured run; None without one.
    """

    shown: PipelineReport
    advised: PipelineReport
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
        all_costs = [roofline_costs(pipeline, chip, target, staged.traffic, guess) for guess in guesses]
        update = update_seconds(pipeline, chip, leaves)
        around = outside_seconds(pipeline, chip, target, staged.traffic)
        costs = all_costs[1]
        seconds = tuple(
            sum_known([its and simulate(schedule, its).makespan, update, around and guess.link_factor * around])
            for its, guess in zip(all_costs, guesses, strict=True)
        )
    run = recorded or pipeline.median_run

    def predicted() -> PipelineReport:
        return timeline(schedule, costs or flops_costs(pipeline), "" if costs is None else "s")

    def cached(how: str, key: PipelineRun | Costs | None, made: Callable[[], PipelineReport]) -> PipelineReport:
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
