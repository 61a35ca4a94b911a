"""Comparison of schedules for the same model: bubbles, memory and the Pareto front of both."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.exports import Exportable
from jaxshard_magic.schedule.costs import Cost, Costs
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.registry import make, schedule_type
from jaxshard_magic.schedule.simulate import simulate

# Largest schedules of a curve, in actions. A search takes longer, so its limit is lower.
_MAX_ACTIONS, _MAX_ACTIONS_SEARCHED = 30_000, 1_500


@dataclass(frozen=True)
class ComparedSchedule:
    """A schedule in a comparison, or the reason for its refusal.

    Attributes:
        name: Name of the schedule.
        chunks: Chunks per rank.
        bubble: Idle share of all ranks' time within the makespan, 0 to 1. None for a refused schedule, as are the
            figures below.
        steady_bubble: Idle share within the span, without a barrier between steps.
        makespan: Time from the first start to the last end, in the unit of the costs.
        span: Longest time of a rank from its own first start to its own last end.
        peak_microbatches: Most activations held by a rank, in microbatches of a whole rank.
        on_front: No other schedule is smaller in bubble or memory and not larger in the other.
        why: Reason for the refusal; None for a valid schedule.
        curve: Pairs (microbatches, bubble), by ascending number of microbatches.
        schedule: The schedule; None if refused.
    """

    name: str
    chunks: int
    bubble: float | None = None
    steady_bubble: float | None = None
    makespan: float | None = None
    span: float | None = None
    peak_microbatches: float | None = None
    on_front: bool = False
    why: str | None = None
    curve: tuple[tuple[int, float], ...] = ()
    schedule: Schedule | None = field(default=None, repr=False)


@dataclass(frozen=True, repr=False)
class ScheduleComparison(Exportable):
    """Schedules of a model at the same sizes.

    Attributes:
        stages: Ranks of the pipeline.
        microbatches: Microbatches per batch.
        costs: Costs of each of `stages` equal parts of the model.
        memory_limit: Most microbatches a rank may hold, for schedules found by search; None for their default.
        rows: The schedules, in the order of the names.
    """

    stages: int
    microbatches: int
    costs: Costs
    memory_limit: float | None
    rows: tuple[ComparedSchedule, ...]

    def __getitem__(self, name: str) -> ComparedSchedule:
        """Return the schedule of this name.

        Raises:
            KeyError: A name outside of the comparison.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def _summary_line(self) -> str:
        names = ", ".join(row.name for row in self.rows)
        return f"<Comparison of {names}: {self.stages} stages x {self.microbatches} microbatches>"


def compare(
    names: str | Sequence[str],
    *,
    stages: int,
    microbatches: int,
    chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
) -> ScheduleComparison:
    """Compare the schedules called `names`, each once, for the same model.

    Curves have points at 1, 2, 4, 8, ... times as many microbatches as stages, each microbatch at the given costs. A
    batch of a fixed size in smaller microbatches has the same bubbles, provided that all its costs shrink in
    proportion.

    Args:
        names: Names in `NAMES`, or a single text with commas between them.
        stages: Ranks of the pipeline.
        microbatches: Microbatches per batch.
        chunks: Chunks per rank for schedules without a fixed number; 2 by default. Other schedules have their own.
        costs: Costs of each of `stages` equal parts of the model, in the order of the model: a number, or a number per
            part. Chunks divide a part and its time further. One unit each by default.
        memory_limit: Most microbatches a rank may hold, for schedules found by search.

    Returns:
        The comparison. A schedule that refuses these sizes has a row with the reason.

    Raises:
        ShardError: An unknown name, or no schedule at all is possible at these sizes.

    >>> comparison = compare(["1f1b", "interleaved"], stages=4, microbatches=8)
    >>> round(comparison["1f1b"].bubble, 4), round(comparison["interleaved"].bubble, 4)
    (0.2727, 0.1579)
    """
    names = tuple(dict.fromkeys(map(str.strip, names.split(",")) if isinstance(names, str) else names))
    costs = costs or Costs()
    rows = [_evaluate(name, stages, microbatches, chunks, costs, memory_limit) for name in names]
    points = [(row.bubble, row.peak_microbatches) for row in rows if row.why is None]
    if not points:
        raise ShardError("; ".join(dict.fromkeys(str(row.why) for row in rows)) or "nothing to compare")
    front = _pareto_front([(bubble, peak) for bubble, peak in points if bubble is not None and peak is not None])
    return ScheduleComparison(
        stages,
        microbatches,
        costs,
        memory_limit,
        tuple(replace(row, on_front=(row.bubble, row.peak_microbatches) in front) for row in rows),
    )


def split_costs(costs: Costs, stages: int, chunks: int) -> Costs:
    """Convert the costs of `stages` model parts to costs of the stages after division into `chunks` chunks.

    The time of a part is divided evenly among its stages. The transfer time between stages and the share of activations
    kept for the weight gradient stay the same.

    Args:
        costs: Costs of the `stages` parts.
        stages: Number of parts.
        chunks: Stages per part.

    Raises:
        ShardError: A list of costs has another length than `stages`.

    >>> split_costs(Costs(forward=(2, 4), transfer=1), 2, 2).forward
    (1.0, 1.0, 2.0, 2.0)
    """
    costs.per_stage(stages)
    if chunks == 1:
        return costs

    def finer(given: Cost, parts: int) -> Cost:
        if isinstance(given, float | int):
            return given / parts
        return [each / parts for each in given for _ in range(chunks)]

    return Costs(
        finer(costs.forward, chunks),
        finer(costs.input_grad, chunks),
        finer(costs.weight_grad, chunks),
        finer(costs.transfer, 1),
        finer(costs.kept_for_weight_grad, 1),
    )


def _evaluate(
    name: str, stages: int, microbatches: int, chunks: int | None, costs: Costs, memory_limit: float | None
) -> ComparedSchedule:
    """Simulate a schedule at the requested size and at the sizes of its curve; a refusal becomes the row's reason."""
    named = schedule_type(name)
    chunks = named.chunks or chunks or 2
    options = {"memory_limit": memory_limit} if named.uses_search else {}

    def schedule_of(number: int) -> Schedule:
        own = split_costs(costs, stages, chunks)
        return make(name, stages=stages, microbatches=number, chunks=chunks, costs=own, **options)

    try:
        schedule = schedule_of(microbatches)
    except ShardError as error:
        # A refused schedule stays in the comparison, with the reason in place of figures.
        return ComparedSchedule(name, chunks, why=str(error))
    simulation = simulate(schedule)
    curve = {microbatches: simulation.bubble}
    for number in _curve_microbatches(stages, microbatches):
        actions = stages * number * chunks * (3 if named.splits_backward else 2)
        if number not in curve and actions <= (_MAX_ACTIONS_SEARCHED if named.uses_search else _MAX_ACTIONS):
            try:
                curve[number] = simulate(schedule_of(number)).bubble
            except ShardError:  # the schedule refuses this size: no point on the curve
                continue
    return ComparedSchedule(
        name,
        chunks,
        simulation.bubble,
        simulation.steady_bubble,
        simulation.makespan,
        simulation.span,
        simulation.peak_microbatches,
        curve=tuple(sorted(curve.items())),
        schedule=schedule,
    )


def _curve_microbatches(stages: int, microbatches: int) -> list[int]:
    """Return 1, 2, 4, 8 times the stages, and on by doubling until twice `microbatches` is reached."""
    numbers = [stages * 2**power for power in range(4)]
    while numbers[-1] < 2 * microbatches:
        numbers.append(2 * numbers[-1])
    return numbers


def _pareto_front(points: Iterable[tuple[float, float]]) -> set[tuple[float, float]]:
    """Return the non-dominated (bubble, peak) points.

    A point is dominated by another point that is smaller in a coordinate and not larger in the other, beyond a rounding
    tolerance of 1e-9.
    """
    points = set(points)
    least = 1e-9
    return {
        (bubble, peak)
        for bubble, peak in points
        if not any(
            other[0] <= bubble + least
            and other[1] <= peak + least
            and (other[0] < bubble - least or other[1] < peak - least)
            for other in points
        )
    }
