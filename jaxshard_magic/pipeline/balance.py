"""Stages of about equal work, with equal numbers of scan layers where the cost of that is small.

`partition` divides a row of units into contiguous parts: even work first, then few bytes at the boundaries.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from ..errors import ShardError
from .loss_units import LossUnits, splittable_layers

# Largest stage with equal parts of a scan, as a multiple of the largest stage of the best partition. Equal stages are
# compiled once.
MAX_EVEN_RATIO = 1.25
_SLACK = 0.08  # share by which the largest part may exceed the smallest possible maximum, for fewer bytes
_AT_ONCE = 1 << 20  # entries of the cost matrix in a block: 8 MiB of float64


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


def partition(
    costs: Sequence[float], crossing: Sequence[float], parts: int, fixed_starts: Mapping[int, bool] | None = None
) -> list[int] | None:
    """Divide a row of units into contiguous parts by dynamic programming.

    The most expensive part may exceed the smallest possible maximum by `_SLACK`. Within this limit, the bytes at the
    boundaries are minimized.

    Args:
        costs: Cost of each unit, in any unit of measure, none below 0.
        crossing: `crossing[u]` is the number of bytes at a boundary before unit u.
        parts: Number of parts, each of at least one unit.
        fixed_starts: Units with a forced answer: True starts a part at any cost, False never starts a part.

    Returns:
        The first unit of each part after the first, ascending, `parts - 1` of them; None if no valid partition exists.

    >>> partition([1, 1, 1, 1], [0, 9, 1, 9], 2)
    [2]
    >>> partition([1, 1, 1, 1], [0, 9, 1, 9], 2, {1: True})
    [1]
    """
    n, fixed_starts = len(costs), fixed_starts or {}
    runs = _RunCosts(costs, fixed_starts)
    limit = runs.min_max_cost(parts) * (1 + _SLACK)
    if not np.isfinite(limit):
        return None
    boundary_bytes = np.asarray(crossing, float)
    # At least 1: it is a divisor below, and all boundaries may be without bytes.
    median_bytes = max(float(np.median(boundary_bytes[1:])) if n > 1 else 0.0, 1.0)
    best = np.full((parts + 1, n + 1), np.inf)
    first = np.zeros((parts + 1, n + 1), int)
    best[0, 0] = 0.0
    for p in range(1, parts + 1):
        for ends, work in runs.blocks():
            # Bytes as a multiple of the median boundary. Between boundaries with the same bytes, the squared work
            # prefers even parts.
            starts = slice(0, work.shape[1])
            scores = (
                best[p - 1, starts] + boundary_bytes[starts] / median_bytes + (work / limit if limit else work) ** 2
            )
            scores[work > limit] = np.inf
            first[p, ends] = np.argmin(scores, axis=1)
            best[p, ends] = np.min(scores, axis=1)
    bounds, end = [], n
    for p in range(parts, 1, -1):
        end = int(first[p, end])
        bounds.append(end)
    return bounds[::-1]


def largest_part_cost(costs: Sequence[float], bounds: Sequence[int]) -> float:
    """Return the cost of the most expensive part, for parts that start at 0 and at `bounds`."""
    ends = [*bounds, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip([0, *bounds], ends, strict=True))


class _RunCosts:
    """Costs of all contiguous runs of units that are allowed as a part."""

    def __init__(self, costs: Sequence[float], fixed: Mapping[int, bool]):
        self._units = len(costs)
        self._before = np.concatenate([[0.0], np.cumsum(costs)])
        self._allowed = np.array([fixed.get(u, True) for u in range(self._units)], bool)
        # For each end, the last forced start before it: a run never extends across one.
        must = [0] + [u if fixed.get(u, False) else 0 for u in range(self._units)]
        self._earliest = np.maximum.accumulate(must)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield a slice of run ends with the costs of all runs to these ends.

        Rows are ends, columns are start units. A cost is infinite if no part may be the run. The cost matrix comes in
        blocks of about `_AT_ONCE` entries.
        """
        rows = max(1, _AT_ONCE // max(self._units, 1))
        for low in range(1, self._units + 1, rows):
            ends = np.arange(low, min(low + rows, self._units + 1))[:, None]
            starts = np.arange(ends[-1, 0])
            may = self._allowed[starts] & (starts >= self._earliest[ends]) & (starts < ends)
            yield (slice(low, low + len(ends)), np.where(may, self._before[ends] - self._before[starts], np.inf))

    def min_max_cost(self, parts: int) -> float:
        """Return the smallest possible cost of the most expensive of `parts` runs that cover all units."""
        least = np.full(self._units + 1, np.inf)
        least[0] = 0.0
        for _ in range(parts):
            now = np.full(self._units + 1, np.inf)
            for ends, work in self.blocks():
                now[ends] = np.min(np.maximum(least[: work.shape[1]], work), axis=1)
            least = now
        return float(least[-1])
