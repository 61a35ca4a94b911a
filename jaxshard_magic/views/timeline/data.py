"""Events of a pipeline in the form that views draw: parsed actions by rank, activations held by each rank, and round
times along the axis."""

import re
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from jaxshard_magic.report import Pipeline, PipelineEvent

KINDS = "FBIW"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ALIKE = 1e-9  # difference of equal times, as a share of the last end
UNITS = ((1e-6, "us"), (1e-3, "ms"), (1.0, "s"))
STEPS = (1, 2, 5, 10)


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


def ticks(end: float, most: int, unit: str) -> list[tuple[float, str]]:
    """Return ticks from 0 to `end` as (time, label); steps are 1, 2 or 5 times a power of ten, and the first label has
    the unit.

    >>> ticks(0.0353, 8, "s")[:3]
    [(0.0, '0 ms'), (0.005, '5'), (0.01, '10')]

    Args:
        end: End of the axis.
        most: Maximal number of steps.
        unit: "s", or "" for times in units of their own.
    """
    one, name = _unit(end) if unit == "s" else (1.0, "")
    if end <= 0:
        return [(0.0, f"0 {name}".rstrip())]
    least = end / one / most
    size = 10.0 ** floor(log10(least))
    # 1e-9: rounding errors must not add or drop a step or a digit.
    step = next(k * size for k in STEPS if k * size >= least * (1 - 1e-9))
    decimals = max(0, ceil(-log10(step) - 1e-9))
    count = floor(end / one / step + 1e-9)
    return [(k * step * one, f"{k * step:.{decimals}f}" if k else f"0 {name}".rstrip()) for k in range(count + 1)]


def _unit(end: float) -> tuple[float, str]:
    """Return the largest unit that `end` has at least two of, for short labels."""
    return next((pair for pair in reversed(UNITS) if end >= 2 * pair[0]), UNITS[0])
