"""Stages of about the same work, with the layers of a scan in equal parts where that costs little."""

from collections.abc import Collection, Mapping

from ..errors import ShardError
from .cut import cut, largest
from .units import Units, layers_of

EVEN = 1.25  # how many times the largest stage of the best cut that of one with equal parts of a scan may be


def stage_starts(
    units: Units, stages: int, chunks: int = 1, among: Collection[int] | None = None
) -> list[int]:
    """The first unit of each of `stages` stages after the first; a rank of the pipeline runs `chunks` of them. `among`:
    the only ones that a stage may start at.

    Raises ShardError where there are fewer units than stages.
    """
    costs = [unit.cost for unit in units.units]
    _enough(len(units.units), stages, chunks)
    fixed: Mapping[int, bool] = {}
    if among is not None:
        fixed = {u: False for u in range(1, len(costs)) if u not in among}
    best = cut(costs, units.crossing, stages, fixed)
    assert best is not None, "allowed_starts refuses too few"
    chosen, limit = best, EVEN * largest(costs, best)
    for first, layers in _scans(units):
        if any(u in fixed for u in range(first + 1, first + layers)):
            continue
        inside = sum(first < start < first + layers for start in chosen)
        options = [
            (largest(costs, starts), starts, more)
            for parts in range(inside + 1, stages + 1)
            if inside
            and layers % parts == 0
            and (
                starts := cut(
                    costs, units.crossing, stages, more := {**fixed, **_equal(first, layers, parts)}
                )
            )
        ]
        fitting = [option for option in options if option[0] <= limit]
        if fitting:
            _, chosen, fixed = min(fitting, key=lambda option: option[0])
    return chosen


def _scans(units: Units) -> list[tuple[int, int]]:
    """The first unit and the number of layers of each scan, the one of the most work first."""
    spans = [units.span[e.index] for e in units.main if layers_of(e)]
    work = {first: sum(u.cost for u in units.units[first : last + 1]) for first, last in spans}
    return [(first, last - first + 1) for first, last in sorted(spans, key=lambda s: -work[s[0]])]


def _equal(first: int, layers: int, parts: int) -> dict[int, bool]:
    """Where stages start in a scan of so many equal parts."""
    return {first + k: k * parts % layers == 0 for k in range(1, layers)}


def _enough(units: int, stages: int, chunks: int) -> None:
    if units >= stages:
        return
    option = f"--stages {stages // chunks}" + (f" of {chunks} chunks each" if chunks > 1 else "")
    if not units:
        raise ShardError(
            "the loss has no operation that depends on parameters and on examples, so that there is nothing to cut "
            "into stages; use dp",
            option=option,
        )
    most = units // chunks
    fewer = "use a schedule with one chunk a rank" if chunks > 1 else "use dp"
    raise ShardError(
        f"the loss has {units} place{'s' * (units > 1)} for a stage (operations on parameters and examples, each layer "
        f"of a scan one), {stages} are needed; {f'use --stages {most} or fewer' if most > 1 else fewer}",
        option=option,
    )
