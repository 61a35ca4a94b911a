"""Stages of about equal work, with equal numbers of scan layers where the cost of that is small."""

from collections.abc import Collection, Mapping

from ..errors import ShardError
from .linear_partition import largest_part_cost, partition
from .loss_units import LossUnits, splittable_layers

# Largest stage with equal parts of a scan, as a multiple of the largest stage of the best partition. Equal stages are
# compiled once.
MAX_EVEN_RATIO = 1.25


def stage_starts(units: LossUnits, stages: int, chunks: int = 1, allowed: Collection[int] | None = None) -> list[int]:
    """Return the first unit of each stage after the first.

    Args:
        units: The units of the loss.
        stages: Number of stages.
        chunks: Number of stages per rank, for messages.
        allowed: The only units at which a stage may start; None for all.

    Raises:
        ShardError: Fewer units than stages.
    """
    costs = [unit.cost for unit in units.units]
    _check_unit_count(len(units.units), stages, chunks)
    fixed_starts: Mapping[int, bool] = {}
    if allowed is not None:
        fixed_starts = {u: False for u in range(1, len(costs)) if u not in allowed}
    best = partition(costs, units.crossing_bytes, stages, fixed_starts)
    assert best is not None, "allowed_starts refuses too few"
    chosen, limit = best, MAX_EVEN_RATIO * largest_part_cost(costs, best)
    for first, layers in _scans(units):
        # A pattern or markers already decide within this scan.
        if any(u in fixed_starts for u in range(first + 1, first + layers)):
            continue
        starts_inside = sum(first < start < first + layers for start in chosen)
        options = [
            (largest_part_cost(costs, starts), starts, scan_starts)
            for parts in range(starts_inside + 1, stages + 1)
            if starts_inside
            and layers % parts == 0
            and (
                starts := partition(
                    costs, units.crossing_bytes, stages, scan_starts := {**fixed_starts, **_equal(first, layers, parts)}
                )
            )
        ]
        within_limit = [option for option in options if option[0] <= limit]
        if within_limit:
            _, chosen, fixed_starts = min(within_limit, key=lambda option: option[0])
    return chosen


def _scans(units: LossUnits) -> list[tuple[int, int]]:
    """Return the first unit and the number of layers of each scan, the scan with most work first."""
    spans = [units.unit_range[e.index] for e in units.main_equations if splittable_layers(e)]
    work = {first: sum(u.cost for u in units.units[first : last + 1]) for first, last in spans}
    return [(first, last - first + 1) for first, last in sorted(spans, key=lambda s: -work[s[0]])]


def _equal(first: int, layers: int, parts: int) -> dict[int, bool]:
    """Return for the layers of a scan whether a stage starts there, for equal parts."""
    return {first + k: k * parts % layers == 0 for k in range(1, layers)}


def _check_unit_count(units: int, stages: int, chunks: int) -> None:
    """Raise ShardError for fewer units than stages."""
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
