"""A schedule in time -> the report's pipeline part: bubbles, ranks, events, and what other choices would cost."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from ..errors import ShardError
from ..report import Bubble, Pipeline, PipelineEvent, Rank, Refused, WhatIf
from ..schedule import NAMES, Costs, Schedule, Simulation, make, simulate

# What-ifs are simulated for so many actions in all: about half a second.
_ACTIONS = 120_000
_CHUNKS = (1, 2, 3)


def timeline(
    schedule: Schedule, costs: Costs | None = None, unit: str = "", *, beside: bool = True
) -> Pipeline:
    """`schedule` as it would run at `costs` (by default its own, or one unit each), beside its ideal.

    Args:
        unit: of the costs: "s", or "" where they are units of their own.
        beside: what other schedules and sizes would cost as well, which takes about half a second.
    """
    run = simulate(schedule, costs)
    costs = run.costs
    own = costs.per_stage(schedule.all_stages)
    ideal = simulate(schedule, costs.even(schedule.all_stages, schedule.losses))
    others, refused = what_if(schedule, costs) if beside else ((), ())
    each = (own.forward, own.input_grad, own.weight_grad, own.transfer)
    return Pipeline(
        schedule.name,
        schedule.stages,
        schedule.microbatches,
        schedule.chunks,
        "predicted",
        unit,
        Bubble(ideal.bubble, simulate(schedule, costs.without_transfer()).bubble, run.bubble),
        (ideal.makespan, run.makespan, None),
        tuple(_rank(run, ideal, rank) for rank in range(schedule.stages)),
        tuple(tuple(map(str, row)) for row in schedule.grid),
        _events(run),
        _events(ideal),
        tuple(zip(*each, strict=True)),
        tuple(others),
        tuple(refused),
        tuple(own.kept),
        schedule.losses,
    )


def _rank(run: Simulation, ideal: Simulation, rank: int) -> Rank:
    return Rank(
        stages=run.schedule.stages_of[rank],
        bubble=_share(run.idle[rank], run.makespan),
        ideal=_share(ideal.idle[rank], ideal.makespan),
        peak_activations=run.peak_activations[rank],
        work=run.makespan - run.idle[rank],
    )


def _share(idle: float, makespan: float) -> float:
    return idle / makespan if makespan else 0.0


def _events(run: Simulation) -> tuple[PipelineEvent, ...]:
    return tuple(PipelineEvent(e.rank, str(e.action), e.start, e.end) for e in run.events)


class _Choice(NamedTuple):
    name: str
    stages: int
    microbatches: int
    chunks: int


def what_if(schedule: Schedule, costs: Costs) -> tuple[list[WhatIf], list[Refused]]:
    """The same work under every other schedule, and with other numbers of stages, microbatches and chunks; and what has
    no form.

    The batch stays, so that twice the microbatches are half as large each. Where the model is cut into as many stages
    as now, each keeps its own costs; else the work is spread evenly. The largest sizes are left out where all of them
    together would take long.
    """
    choices = sorted(
        _choices(schedule), key=lambda c: (c[1:] != _sizes(schedule), c.stages * c.microbatches * c.chunks)
    )
    left, others, refused = _ACTIONS, [], []
    for choice in choices:
        left -= _effort(choice)
        if left < 0:
            break
        try:
            others.append(imagined(schedule, costs, *choice))
        except ShardError as error:
            refused.append(Refused(*choice, str(error)))
    return others, refused


def imagined(now: Schedule, costs: Costs, name: str, stages: int, microbatches: int, chunks: int) -> WhatIf:
    """The work that `now` does at `costs` under another schedule, or in other sizes; see `what_if`.

    Raises ShardError where that schedule has no form for these sizes.
    """
    choice = _Choice(name, stages, microbatches, chunks)
    scaled = _scaled(now, costs, choice)
    one = make(**choice._asdict(), costs=_of_one(scaled, now.losses))
    other = one.for_losses(now.losses)
    run = simulate(other, scaled)
    ideal = simulate(other, scaled.even(other.all_stages, other.losses))
    share = now.stages * now.microbatches / (other.stages * other.chunks * other.microbatches)
    return WhatIf(
        other.name,
        other.stages,
        other.microbatches,
        other.chunks,
        ideal.bubble,
        run.bubble,
        run.makespan,
        max(run.peak_activations) * share,
    )


def _effort(choice: _Choice) -> int:
    """The actions of a schedule, those of one that searches tenfold."""
    named = NAMES[choice.name]
    actions = choice.stages * choice.microbatches * choice.chunks * (3 if named.splits else 2)
    return actions * (10 if named.searches else 1)


def _sizes(schedule: Schedule) -> tuple[int, int, int]:
    return schedule.stages, schedule.microbatches, schedule.chunks


def _choices(schedule: Schedule) -> Iterable[_Choice]:
    p, m, _ = _sizes(schedule)
    for name, named in NAMES.items():
        for stages in sorted({max(2, p // 2), p, 2 * p}):
            for microbatches in sorted({max(1, m // 2), m, 2 * m, 4 * m}):
                for chunks in _CHUNKS if named.chunks is None else (named.chunks,):
                    yield _Choice(name, stages, microbatches, chunks)


def _scaled(now: Schedule, costs: Costs, choice: _Choice) -> Costs:
    """What the work of `now` costs each stage of another choice, on its microbatches."""
    stages, others = now.stages_of_loss, choice.stages * choice.chunks
    microbatch = now.microbatches / choice.microbatches
    own = costs.per_stage(now.all_stages)

    def scaled(numbers: Sequence[float], parts: int) -> list[float]:
        losses = [numbers[s : s + stages] for s in range(0, now.all_stages, stages)]
        per_stage = (each if others == stages else [sum(each) / parts] * others for each in losses)
        return [number * microbatch for each in per_stage for number in each]

    work = (scaled(each, others) for each in (own.forward, own.input_grad, own.weight_grad))
    kept = own.kept if others == stages else fmean(own.kept)
    return Costs(*work, transfer=scaled(own.transfer, stages), kept_for_weight_grad=kept)


def _of_one(costs: Costs, losses: int) -> Costs:
    """The costs of the stages of the first of several losses, for which a schedule is made."""
    if losses == 1:
        return costs
    of = vars(costs).values()
    return Costs(*(each if isinstance(each, float) else each[: len(each) // losses] for each in of))
