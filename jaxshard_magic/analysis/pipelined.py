"""A pipeline that ran, or was compiled -> the report's pipeline part."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from ..pipeline.record import Run
from ..report import Pipeline, PipelineEvent
from ..schedule.actions import parts
from .timeline import timeline


def measured(
    run: Run, split: Sequence[float] | None = None, alike: Sequence[Hashable] | None = None
) -> Pipeline:
    """What `run` measured, beside what its costs predict and the ideal of even stages.

    Args:
        split: of each stage, the share of a whole backward pass that is its input gradient; see `Run.costs`.
        alike: of each stage, what it shares with those that run the same programs; see `Run.costs`.

    Raises ShardError where the run was not timed to its end.
    """
    predicted = timeline(run.schedule, run.costs(split, alike), "s")
    makespan = run.makespan
    ranks = tuple(
        replace(rank, bubble=1 - work / makespan if makespan else 0.0, peak_activations=peak, work=work)
        for rank, work, peak in zip(predicted.ranks, run.work, run.peaks, strict=True)
    )
    return replace(
        predicted,
        source="measured",
        bubble=replace(predicted.bubble, measured=run.bubble()),
        makespan=(*predicted.makespan[:2], makespan),
        ranks=ranks,
        events=tuple(_events(run)),
    )


def of_model(
    pipeline: Pipeline,
    holds: Sequence[str],
    devices: Sequence[tuple[int, ...]],
    activation_bytes: Sequence[int | None],
) -> Pipeline:
    """`pipeline` with what its ranks are.

    Args:
        holds: of each rank, what of the model it is: "wte, blocks 0-3".
        devices: of each rank, the ids of its devices.
        activation_bytes: of each rank, the bytes of the activations that it holds at its fullest, on one device.
    """
    ranks = tuple(
        replace(rank, holds=what, devices=ids, activation_bytes=size)
        for rank, what, ids, size in zip(pipeline.ranks, holds, devices, activation_bytes, strict=True)
    )
    return replace(pipeline, ranks=ranks)


def _events(run: Run) -> Iterator[PipelineEvent]:
    """The events from the first start on; those of a fused action's parts as one, as its ideal is."""
    first, ran = run.start, {event.action: event for event in run.events}
    for rank, row in enumerate(run.schedule.grid):
        for step in row:
            if own := [ran[str(part)] for part in parts(step) if str(part) in ran]:
                start, end = min(event.start for event in own), max(event.end for event in own)
                yield PipelineEvent(rank, str(step), start - first, end - first)
