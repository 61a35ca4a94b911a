"""Events of a pipeline in the form that views draw: parsed actions by rank, and activations held by each rank."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxshard_magic.report import Pipeline, PipelineEvent

KINDS = "FBIW"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ALIKE = 1e-9  # difference of equal times, as a share of the last end


class PipelineAction(NamedTuple):
    """Action of a pipeline.

    Attributes:
        stage: Number of the stage.
        kind: F, B, I or W.
        microbatch: Number of the microbatch.
    """

    stage: int
    kind: str
    microbatch: int


class LaneEvent(NamedTuple):
    """Time in which a rank runs one action, or several fused ones.

    Attributes:
        actions: Actions.
        start: Start time, in the unit of the pipeline.
        end: End time.
    """

    actions: tuple[PipelineAction, ...]
    start: float
    end: float

    @property
    def text(self) -> str:
        """Actions in short: `2F0`, `2F4+3B1`."""
        return "+".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in self.actions)


def lanes(p: Pipeline, events: Iterable[PipelineEvent]) -> list[list[LaneEvent]]:
    """Return the events of each rank by start time, without those that name no action.

    Args:
        p: Gives the number of ranks.
        events: Events of all ranks.
    """
    lanes: list[list[LaneEvent]] = [[] for _ in p.ranks]
    for event in events:
        parts = tuple(PipelineAction(int(s), kind, int(mb)) for s, kind, mb in _ACTION.findall(event.action))
        if parts and 0 <= event.rank < len(lanes):
            lanes[event.rank].append(LaneEvent(parts, event.start, event.end))
    for lane in lanes:
        lane.sort(key=lambda mark: mark.start)
    return lanes


def end_of(p: Pipeline) -> float:
    """Return the end of the last event, of the shown and the ideal timeline; 0 without events."""
    return max((event.end for event in (*p.events, *p.ideal_events)), default=0.0)


def has_ideal(p: Pipeline) -> bool:
    """Return whether the ideal timeline differs from the shown one."""
    near = _ALIKE * end_of(p)
    ideal = {(event.rank, event.action): event for event in p.ideal_events}
    for event in p.events:
        other = ideal.get((event.rank, event.action))
        if other and (abs(other.start - event.start) > near or abs(other.end - event.end) > near):
            return True
    return False


def kinds_of(p: Pipeline) -> list[str]:
    """Return the kinds of actions in the pipeline, in the order of execution."""
    there = {kind for row in p.grid for action in row for _, kind, _ in _ACTION.findall(action)}
    return [kind for kind in KINDS if kind in there]


def held_activations(p: Pipeline, lane: Sequence[LaneEvent]) -> list[tuple[float, float]]:
    """Return the activations held by a rank as (time, count from then on).

    A forward action adds one activation at its start, and a backward action removes it at its end. Between the end of
    the input gradient and the end of the weight gradient, the share `Pipeline.kept` of the stage is still held.

    Args:
        p: Pipeline.
        lane: Events of one rank.
    """
    changes: list[tuple[float, float]] = []
    for parts, start, end in lane:
        for stage, kind, _ in parts:
            kept = p.kept[stage] if stage < len(p.kept) else 1.0
            freed = {"F": -1.0, "B": 1.0, "I": 1.0 - kept, "W": kept}[kind]
            changes.append((start if kind == "F" else end, -freed))
    return _summed(sorted(changes))


def _summed(changes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the running sum of (time, change) pairs, with one entry for each time."""
    now, steps = 0.0, [(0.0, 0.0)]
    for at, change in changes:
        now += change
        if at == steps[-1][0]:
            steps[-1] = (at, now)
        else:
            steps.append((at, now))
    return steps


def kind_shares(lane: Sequence[LaneEvent], end: float, columns: int) -> list[dict[str, float]]:
    """Return for each column of time the share filled by each kind of action.

    Args:
        lane: Events of one rank.
        end: End of the last column.
        columns: Number of columns.
    """
    slots: list[dict[str, float]] = [{} for _ in range(columns)]
    for parts, start, stop in lane:
        for at, share in _covered(start, stop, end / columns, columns):
            for _, kind, _ in parts:
                slots[at][kind] = slots[at].get(kind, 0.0) + share / len(parts)
    return slots


def _covered(start: float, stop: float, slot: float, columns: int) -> Iterator[tuple[int, float]]:
    """Yield (column, share of the column) for each column that an action overlaps."""
    if slot <= 0:
        return
    for at in range(max(0, int(start / slot)), min(columns, int(stop / slot) + 1)):
        share = (min(stop, (at + 1) * slot) - max(start, at * slot)) / slot
        if share > 0:
            yield at, share
