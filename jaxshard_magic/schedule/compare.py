"""`compare`: schedules of one model side by side, what each costs and holds, and which of them none beats in both."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.sent import PageWidget, Picture, Sendable
from jaxshard_magic.schedule.costs import Cost, Costs
from jaxshard_magic.schedule.grid import Schedule
from jaxshard_magic.schedule.names import known, make
from jaxshard_magic.schedule.simulate import simulate

# The largest schedules that a curve is drawn through, in actions: those that search take longer.
_MOST, _MOST_SEARCHED = 30_000, 1_500


@dataclass(frozen=True)
class Row:
    """One of the schedules. What is not known is None: `why` then says why it was refused.

    `peak_microbatches`: the most that a rank holds, in microbatches of a whole rank. `on_front`: no other has a
    smaller bubble without holding more. `curve`: (microbatches, bubble), the microbatches ascending.
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
class Comparison(Sendable):
    """Schedules of one model at the same sizes; `costs` are those of a stages-th of the model."""

    stages: int
    microbatches: int
    costs: Costs
    memory_limit: float | None
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        """The row of that name. Raises KeyError for others."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def _ways(self) -> tuple[Any, Any, Any]:
        from jaxshard_magic.views import schedules

        return schedules.to_text, schedules.to_html, schedules.page

    def _pictures(self) -> Mapping[str, Picture]:
        from jaxshard_magic.views.pictures import charts

        return charts.schedules(self)

    def _live(self) -> Sequence[PageWidget]:
        """The timeline of each."""
        made = {
            row.name: row.schedule.timeline(beside=False) for row in self.rows if row.schedule is not None
        }
        return [replace(live, title=name) for name, p in made.items() for live in p._live()]

    def _short(self) -> str:
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
) -> Comparison:
    """The schedules called `names`, each once, for the same model.

    The curves are at 1, 2, 4, 8, ... times as many microbatches as stages, each microbatch at the costs given. A batch
    of one size cut finer has the same bubbles, where all its costs shrink alike.

    Args:
        names: of `NAMES`; or one text, with commas between them.
        stages: ranks of the pipeline.
        microbatches: parts of the batch.
        chunks: of the schedules that take any number; 2 by default. The others have their own.
        costs: what one of `stages` equal parts of the model costs, in the model's order: a number, or one per part.
            Chunks cut a part further, and its time with it; one unit each by default.
        memory_limit: for the schedules that search, the most microbatches that a rank may hold.

    Raises ShardError for an unknown name, and where no schedule can be made for these sizes.

    >>> found = compare(["1f1b", "interleaved"], stages=4, microbatches=8)
    >>> round(found["1f1b"].bubble, 4), round(found["interleaved"].bubble, 4)
    (0.2727, 0.1579)
    """
    names = tuple(dict.fromkeys(names.split(",") if isinstance(names, str) else names))
    costs = costs or Costs()
    rows = [_row(name, stages, microbatches, chunks, costs, memory_limit) for name in names]
    made = [(row.bubble, row.peak_microbatches) for row in rows if row.why is None]
    if not made:
        raise ShardError("; ".join(dict.fromkeys(str(row.why) for row in rows)) or "nothing to compare")
    front = _front([(bubble, peak) for bubble, peak in made if bubble is not None and peak is not None])
    return Comparison(
        stages,
        microbatches,
        costs,
        memory_limit,
        tuple(replace(row, on_front=(row.bubble, row.peak_microbatches) in front) for row in rows),
    )


def cut(costs: Costs, stages: int, chunks: int) -> Costs:
    """`costs` of each of `stages` parts of a model, as those of the stages that `chunks` chunks cut it into.

    A part's time is shared evenly by its stages. What goes from stage to stage is as large as before, and so is the
    share that is kept.

    >>> cut(Costs(forward=(2, 4), transfer=1), 2, 2).forward
    (1.0, 1.0, 2.0, 2.0)

    Raises ShardError where a list of costs has another length than `stages`.
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


def _row(
    name: str, stages: int, microbatches: int, chunks: int | None, costs: Costs, memory_limit: float | None
) -> Row:
    named = known(name)
    chunks = named.chunks or chunks or 2
    options = {"memory_limit": memory_limit} if named.searches else {}

    def schedule_of(number: int) -> Schedule:
        own = cut(costs, stages, chunks)
        return make(name, stages=stages, microbatches=number, chunks=chunks, costs=own, **options)

    try:
        schedule = schedule_of(microbatches)
    except ShardError as error:
        return Row(name, chunks, why=str(error))
    simulation = simulate(schedule)
    curve = {microbatches: simulation.bubble}
    for number in _numbers(stages, microbatches):
        actions = stages * number * chunks * (3 if named.splits else 2)
        if number not in curve and actions <= (_MOST_SEARCHED if named.searches else _MOST):
            try:
                curve[number] = simulate(schedule_of(number)).bubble
            except ShardError:  # of a size that it has no form for, it has no bubble
                continue
    return Row(
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


def _numbers(stages: int, microbatches: int) -> list[int]:
    """1, 2, 4, 8 times the stages, and on until twice the microbatches are reached."""
    numbers = [stages * 2**power for power in range(4)]
    while numbers[-1] < 2 * microbatches:
        numbers.append(2 * numbers[-1])
    return numbers


def _front(points: Iterable[tuple[float, float]]) -> set[tuple[float, float]]:
    """The (bubble, peak) that no other point is below in one and not above in the other, but for rounding."""
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
