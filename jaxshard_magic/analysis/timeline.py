"""A schedule in time -> the report's pipeline part: bubbles, ranks, events, and what other choices would cost."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Bubble, Pipeline, PipelineEvent, Rank, WhatIf
from jaxshard_magic.schedule import NAMES, Costs, Schedule, Simulation, make, simulate

# What-ifs are simulated for so many actions in all: about half a second.
_ACTIONS = 120_000
_CHUNKS = (1, 2, 3)


def timeline(schedule: Schedule, costs: Costs | None = None, unit: str = "") -> Pipeline:
    """`schedule` as it would run at `costs` (by default its own, or one unit each), beside its ideal.

    Args:
        unit: of the costs: "s", or "" where they are units of their own.
    """
    found = simulate(schedule, costs)
    costs = found.costs
    stages = schedule.stages * schedule.chunks
    own = costs.per_stage(stages)
    ideal = simulate(schedule, costs.even(stages))
    each = (own.forward, own.input_grad, own.weight_grad, own.transfer)
    return Pipeline(
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        schedule.chunks,
        "predicted",
        unit,
        Bubble(ideal.bubble, simulate(schedule, costs.without_transfer()).bubble, found.bubble),
        (ideal.makespan, found.makespan, None),
        tuple(_rank(found, ideal, rank) for rank in range(schedule.stages)),
        tuple(tuple(map(str, row)) for row in schedule.grid),
        _events(found),
        _events(ideal),
        tuple(zip(*each, strict=True)),
        tuple(what_if(schedule, costs)),
    )


def _rank(found: Simulation, ideal: Simulation, rank: int) -> Rank:
    return Rank(
        stages=found.schedule.stages_of[rank],
        bubble=_share(found.idle[rank], found.makespan),
        ideal=_share(ideal.idle[rank], ideal.makespan),
        peak_activations=found.peak_activations[rank],
        work=found.makespan - found.idle[rank],
    )


def _share(idle: float, makespan: float) -> float:
    return idle / makespan if makespan else 0.0


def _events(found: Simulation) -> tuple[PipelineEvent, ...]:
    return tuple(PipelineEvent(e.rank, str(e.action), e.start, e.end) for e in found.events)


class _Choice(NamedTuple):
    name: str
    stages: int
    microbatches: int
    chunks: int


def what_if(schedule: Schedule, costs: Costs) -> Iterator[WhatIf]:
    """The same work under every other schedule, and with other numbers of stages, microbatches and chunks.

    The batch stays, so that twice the microbatches are half as large each. Where the model is cut into as many stages
    as now, each keeps its own costs; else the work is spread evenly. Choices that a schedule refuses are left out, and
    those that search; the largest are where all of them together would take long to simulate.
    """
    choices = sorted(
        _choices(schedule), key=lambda c: (c[1:] != _sizes(schedule), c.stages * c.microbatches * c.chunks)
    )
    left = _ACTIONS
    for choice in choices:
        left -= choice.stages * choice.microbatches * choice.chunks * (3 if NAMES[choice.name].splits else 2)
        if left < 0:
            return
        try:
            other = make(
                choice.name, stages=choice.stages, microbatches=choice.microbatches, chunks=choice.chunks
            )
        except ShardError:
            continue
        yield _imagined(schedule, costs, other)


def _sizes(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.stages, schedule.microbatches, schedule.chunks


def _choices(schedule: Schedule) -> Iterable[_Choice]:
    p, m, _ = _sizes(schedule)
    for name, named in NAMES.items():
        if not named.searches:
            for stages in sorted({max(2, p // 2), p, 2 * p}):
                for microbatches in sorted({max(1, m // 2), m, 2 * m, 4 * m}):
                    for chunks in _CHUNKS if named.chunks is None else (named.chunks,):
                        yield _Choice(name, stages, microbatches, chunks)


def _imagined(now: Schedule, costs: Costs, other: Schedule) -> WhatIf:
    stages, others = now.stages * now.chunks, other.stages * other.chunks
    found = simulate(other, _scaled(costs, stages, others, now.microbatches / other.microbatches))
    ideal = simulate(other, Costs(*(fmean(each) for each in costs.per_stage(stages)[:3])))
    share = now.stages * now.microbatches / (others * other.microbatches)
    return WhatIf(
        other.name,
        other.stages,
        other.microbatches,
        other.chunks,
        ideal.bubble,
        found.bubble,
        found.makespan,
        max(found.peak_activations) * share,
    )


def _scaled(costs: Costs, stages: int, others: int, microbatch: float) -> Costs:
    """`costs` with the work of `stages` stages in `others`, on microbatches that are so many times as large."""
    own = costs.per_stage(stages)

    def scaled(numbers: Sequence[float], parts: int) -> list[float]:
        per_stage = numbers if others == stages else [sum(numbers) / parts] * others
        return [number * microbatch for number in per_stage]

    work = (scaled(each, others) for each in (own.forward, own.input_grad, own.weight_grad))
    kept = own.kept if others == stages else fmean(own.kept)
    return Costs(*work, transfer=scaled(own.transfer, stages), kept_for_weight_grad=kept)
