"""Pipeline part of a report, from a timed run, and the model parts on each rank."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from ..pipeline.record import PipelineRun
from ..report import Pipeline, PipelineEvent
from ..schedule.actions import entry_actions
from ..schedule.timeline import timeline


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
