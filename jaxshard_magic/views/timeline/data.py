"""A pipeline's events as the views draw them: rank by rank, their actions read, and what each rank holds."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jaxshard_magic.report import Pipeline, PipelineEvent

KINDS = "FBIW"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_ALIKE = 1e-9  # of the makespan


class Part(NamedTuple):
    """One action: `kind` is F, B, I or W."""

    stage: int
    kind: str
    microbatch: int


class Mark(NamedTuple):
    """What a rank does from `start` to `end`: one action, or several that are fused."""

    parts: tuple[Part, ...]
    start: float
    end: float

    @property
    def text(self) -> str:
        """`2F0`, `2F4+3B1`."""
        return "+".join(f"{stage}{kind}{microbatch}" for stage, kind, microbatch in self.parts)


def lanes(p: Pipeline, events: Iterable[PipelineEvent]) -> list[list[Mark]]:
    """The events of each rank in their order; what names no action is left out."""
    lanes: list[list[Mark]] = [[] for _ in p.ranks]
    for event in events:
        parts = tuple(Part(int(s), kind, int(mb)) for s, kind, mb in _ACTION.findall(event.action))
        if parts and 0 <= event.rank < len(lanes):
            lanes[event.rank].append(Mark(parts, event.start, event.end))
    for lane in lanes:
        lane.sort(key=lambda mark: mark.start)
    return lanes


def end_of(p: Pipeline) -> float:
    """The end of the last event, ideal or not."""
    return max((event.end for event in (*p.events, *p.ideal_events)), default=0.0)


def has_ideal(p: Pipeline) -> bool:
    """Whether the ideal is another than what is shown."""
    near = _ALIKE * end_of(p)
    ideal = {(event.rank, event.action): event for event in p.ideal_events}
    for event in p.events:
        other = ideal.get((event.rank, event.action))
        if other and (abs(other.start - event.start) > near or abs(other.end - event.end) > near):
            return True
    return False


def kinds_of(p: Pipeline) -> list[str]:
    """The kinds of actions that there are, in the order in which they run."""
    there = {kind for row in p.grid for action in row for _, kind, _ in _ACTION.findall(action)}
    return [kind for kind in KINDS if kind in there]


def activations(p: Pipeline, lane: Sequence[Mark]) -> list[tuple[float, float]]:
    """(time, activations held from then on): one from the start of a forward action on, until the backward one ends.

    Between its input and its weight gradient a stage holds its `kept` share of it.
    """
    changes: list[tuple[float, float]] = []
    for parts, start, end in lane:
        for stage, kind, _ in parts:
            kept = p.kept[stage] if stage < len(p.kept) else 1.0
            freed = {"F": -1.0, "B": 1.0, "I": 1.0 - kept, "W": kept}[kind]
            changes.append((start if kind == "F" else end, -freed))
    return _summed(sorted(changes))


def _summed(changes: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    now, steps = 0.0, [(0.0, 0.0)]
    for at, change in changes:
        now += change
        if at == steps[-1][0]:
            steps[-1] = (at, now)
        else:
            steps.append((at, now))
    return steps


def shares(lane: Sequence[Mark], end: float, columns: int) -> list[dict[str, float]]:
    """Of each of so many columns of the time until `end`, the share that each kind of action fills."""
    slots: list[dict[str, float]] = [{} for _ in range(columns)]
    for parts, start, stop in lane:
        for at, share in _covered(start, stop, end / columns, columns):
            for _, kind, _ in parts:
                slots[at][kind] = slots[at].get(kind, 0.0) + share / len(parts)
    return slots


def _covered(start: float, stop: float, slot: float, columns: int) -> Iterator[tuple[int, float]]:
    """The columns that an action lies in, each with the share of it that the action fills."""
    if slot <= 0:
        return
    for at in range(max(0, int(start / slot)), min(columns, int(stop / slot) + 1)):
        share = (min(stop, (at + 1) * slot) - max(start, at * slot)) / slot
        if share > 0:
            yield at, share
