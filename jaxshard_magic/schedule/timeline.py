"""Pipeline part of a report from a simulated schedule: bubbles, ranks, events and alternatives."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Bubble, Pipeline, PipelineEvent, PipelineRank, RefusedSchedule, WhatIf
from jaxshard_magic.schedule.costs import Costs
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.registry import NAMES, make
from jaxshard_magic.schedule.simulate import Simulation, simulate

# Actions simulated for all alternatives together: about half a second.
_ACTIONS = 120_000
_CHUNKS = (1, 2, 3)


def timeline(
    schedule: Schedule, costs: Costs | None = None, unit: str = "", *, with_alternatives: bool = True
) -> Pipeline:
    """Return `schedule` as simulated at `costs`, next to its ideal.

    Args:
        schedule: The schedule.
        costs: Costs of the actions; by default the schedule's own, or one unit each.
        unit: Unit of the costs: "s", or "" for arbitrary units.
        with_alternatives: Simulate other schedules and sizes as well. Cost: about half a second.
    """
    run = simulate(schedule, costs)
    costs = run.costs
    own = costs.per_stage(schedule.all_stages)
    ideal = simulate(schedule, costs.even(schedule.all_stages, schedule.losses))
    others, refused = what_if(schedule, costs) if with_alternatives else ((), ())
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
        tuple(own.kept_for_weight_grad),
        schedule.losses,
    )


def _rank(run: Simulation, ideal: Simulation, rank: int) -> PipelineRank:
    return PipelineRank(
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


def what_if(schedule: Schedule, costs: Costs) -> tuple[list[WhatIf], list[RefusedSchedule]]:
    """Return the same work under all other schedules and sizes, and the combinations without a valid schedule.

    Sizes are numbers of stages, microbatches and chunks. The batch is fixed: twice the microbatches are half as large
    each. With an equal number of stages each stage keeps its costs; otherwise the work is spread evenly. The largest
    sizes are left out where simulating all would take long.

    Args:
        schedule: The current schedule.
        costs: Its costs.

    Returns:
        The alternatives, and the refused combinations with reasons.
    """
    # Current sizes come first, then small ones, as only so many actions are simulated.
    choices = sorted(
        _choices(schedule), key=lambda c: (c[1:] != _sizes(schedule), c.stages * c.microbatches * c.chunks)
    )
    left, others, refused = _ACTIONS, [], []
    for choice in choices:
        left -= _effort(choice)
        if left < 0:
            break
        try:
            others.append(simulate_choice(schedule, costs, *choice))
        except ShardError as error:
            refused.append(RefusedSchedule(*choice, str(error)))
    return others, refused


def simulate_choice(now: Schedule, costs: Costs, name: str, stages: int, microbatches: int, chunks: int) -> WhatIf:
    """Return the work of `now` under another schedule, or in other sizes; see `what_if`.

    Args:
        now: The current schedule.
        costs: Its costs.
        name: Name of the other schedule.
        stages: Number of pipeline ranks.
        microbatches: Number of microbatches.
        chunks: Number of stages per rank.

    Raises:
        ShardError: The schedule does not exist in these sizes.
    """
    choice = _Choice(name, stages, microbatches, chunks)
    scaled = _scaled(now, costs, choice)
    # A schedule is made for one loss, and then repeated.
    one = make(**choice._asdict(), costs=_of_one(scaled, now.losses))
    other = one.for_losses(now.losses)
    run = simulate(other, scaled)
    ideal = simulate(other, scaled.even(other.all_stages, other.losses))
    # Peaks are compared in microbatches of a whole rank of the current pipeline.
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
    """Return the number of simulated actions, tenfold for a schedule found by search."""
    named = NAMES[choice.name]
    actions = choice.stages * choice.microbatches * choice.chunks * (3 if named.splits_backward else 2)
    return actions * (10 if named.uses_search else 1)


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
    """Return the costs of the work of `now` for the stages and microbatches of another choice."""
    stages, others = now.stages_per_loss, choice.stages * choice.chunks
    microbatch = now.microbatches / choice.microbatches
    own = costs.per_stage(now.all_stages)

    def scaled(numbers: Sequence[float], parts: int) -> list[float]:
        losses = [numbers[s : s + stages] for s in range(0, now.all_stages, stages)]
        per_stage = (each if others == stages else [sum(each) / parts] * others for each in losses)
        return [number * microbatch for each in per_stage for number in each]

    work = (scaled(each, others) for each in (own.forward, own.input_grad, own.weight_grad))
    kept = own.kept_for_weight_grad if others == stages else fmean(own.kept_for_weight_grad)
    return Costs(*work, transfer=scaled(own.transfer, stages), kept_for_weight_grad=kept)


def _of_one(costs: Costs, losses: int) -> Costs:
    """Return the costs of the stages of the first of several losses: a schedule is generated for one loss."""
    if losses == 1:
        return costs
    of = vars(costs).values()
    return Costs(*(each if isinstance(each, float) else each[: len(each) // losses] for each in of))
