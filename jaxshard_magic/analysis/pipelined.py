"""A pipeline that ran, or was compiled -> the report's pipeline part."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from ..pipeline.record import Run
from ..report import Pipeline, PipelineEvent, Rank
from ..schedule import Costs, Schedule
from ..schedule.actions import parts
from .timeline import timeline


def measured(
    run: Run,
    *,
    holds: Sequence[str | None],
    devices: Sequence[tuple[int, ...]],
    activation_bytes: Sequence[int | None],
    split: Sequence[float] | None = None,
    alike: Sequence[Hashable] | None = None,
) -> Pipeline:
    """What `run` measured, beside what its costs predict and the ideal of even stages.

    Args:
        holds: of each rank, what of the model it is: "wte, blocks 0-3".
        devices: of each rank, the ids of its devices.
        activation_bytes: of each rank, the bytes of the activations that it holds at its fullest, on one device.
        split: of each stage, the share of a whole backward pass that is its input gradient; see `Run.costs`.
        alike: of each stage, what it shares with those that run the same programs; see `Run.costs`.

    Raises ShardError where the run was not timed to its end.
    """
    costs = run.costs(split, alike)
    made = predicted(run.schedule, costs, holds=holds, devices=devices, activation_bytes=activation_bytes)
    makespan = run.makespan
    ranks = tuple(
        replace(rank, bubble=1 - work / makespan if makespan else 0.0, peak_activations=peak, work=work)
        for rank, work, peak in zip(made.ranks, run.work, run.peaks, strict=True)
    )
    return replace(
        made,
        source="measured",
        bubble=replace(made.bubble, measured=run.bubble()),
        makespan=(*made.makespan[:2], makespan),
        ranks=ranks,
        events=tuple(_events(run)),
    )


def predicted(
    schedule: Schedule,
    costs: Costs,
    *,
    holds: Sequence[str | None],
    devices: Sequence[tuple[int, ...]],
    activation_bytes: Sequence[int | None],
    unit: str = "s",
) -> Pipeline:
    """`schedule` as it would run at `costs`, in `unit`, beside the ideal of even stages; the rest as in `measured`."""
    made = timeline(schedule, costs, unit)
    given = zip(made.ranks, holds, devices, activation_bytes, strict=True)
    return replace(made, ranks=tuple(_of_model(*each) for each in given))


def _of_model(rank: Rank, holds: str | None, devices: tuple[int, ...], held: int | None) -> Rank:
    return replace(rank, holds=holds, devices=tuple(devices), activation_bytes=held)


def _events(run: Run) -> Iterator[PipelineEvent]:
    """The events from the first start on; those of a fused action's parts as one, as its ideal is."""
    first, ran = run.start, {event.action: event for event in run.events}
    for rank, row in enumerate(run.schedule.grid):
        for step in row:
            if own := [ran[str(part)] for part in parts(step) if str(part) in ran]:
                start, end = min(event.start for event in own), max(event.end for event in own)
                yield PipelineEvent(rank, str(step), start - first, end - first)
