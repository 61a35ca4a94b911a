"""Runs of pipelines as execution would have recorded them, made from a schedule in time at known costs."""

from collections.abc import Iterator, Mapping

from jaxshard_magic.pipeline.record import ActionEvent, Handover, PipelineRun
from jaxshard_magic.schedule import Action, Costs, Schedule, simulate
from jaxshard_magic.schedule.actions import entry_actions


def ran(made: Schedule, costs: Costs, start: float = 0.25) -> PipelineRun:
    """`made` run exactly at `costs`, its first action `start` seconds after the step began.

    A receiver sees a result when it comes, or when it is done with what it does until then.
    """
    found = simulate(made, costs)
    events = tuple(
        event for placed in found.events for event in _parts(made, costs, placed.rank, placed.action, placed)
    )
    moved = tuple(ActionEvent(e.rank, e.action, e.start + start, e.end + start) for e in events)
    peaks = tuple(map(int, found.peak_activations))
    handovers = tuple(_handovers(made, costs, {e.action: e for e in moved}))
    return PipelineRun(made, moved, handovers, peaks, start + found.makespan + 0.5)


def _parts(made: Schedule, costs: Costs, rank: int, step, placed) -> Iterator[ActionEvent]:
    """The parts of a fused action one after the other."""
    own, now = costs.per_stage(made.stages * made.chunks), placed.start
    takes = {"F": own.forward, "B": own.backward, "I": own.input_grad, "W": own.weight_grad}
    for part in entry_actions(step):
        end = now + takes[part.kind][part.stage]
        yield ActionEvent(rank, str(part), now, end)
        now = end


def _handovers(made: Schedule, costs: Costs, ended: Mapping[str, ActionEvent]) -> Iterator[Handover]:
    transfer = costs.per_stage(made.stages * made.chunks).transfer
    for row in made.grid:
        free = 0.0
        for step in row:
            for stage, kind, mb in entry_actions(step):
                sender = {"F": stage - 1, "W": -1}.get(kind, stage + 1)
                if 0 <= sender < len(transfer) and made.rank_of[sender] != made.rank_of[stage]:
                    names = [str(Action(sender, k, mb)) for k in ("F" if kind == "F" else "BI")]
                    sent = next(ended[name].end for name in names if name in ended)
                    yield Handover(sender, stage, mb, sent, max(free, sent + transfer[sender]))
                free = ended[str(Action(stage, kind, mb))].end
