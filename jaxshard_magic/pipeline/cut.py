"""Where a row of units is cut into parts: the largest as small as can be, then where few bytes cross."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

SLACK = 0.08  # what the largest part may exceed the smallest possible largest by, for fewer bytes to cross
_AT_ONCE = 1 << 20  # runs that are looked at together: 8 MiB of costs


def cut(
    costs: Sequence[float], crossing: Sequence[float], parts: int, fixed: Mapping[int, bool] | None = None
) -> list[int] | None:
    """The first unit of each part after the first, ascending, `parts - 1` of them; None where there is no such cut.

    Args:
        costs: what each unit costs, in any unit, none below 0.
        crossing: `crossing[u]` is the bytes that cross a boundary before unit u.
        parts: how many, each of at least one unit.
        fixed: units that a part starts at whatever that costs (True), or that none starts at (False).

    >>> cut([1, 1, 1, 1], [0, 9, 1, 9], 2)
    [2]
    >>> cut([1, 1, 1, 1], [0, 9, 1, 9], 2, {1: True})
    [1]
    """
    n, fixed = len(costs), fixed or {}
    runs = _Runs(costs, fixed)
    limit = runs.least_largest(parts) * (1 + SLACK)
    if not np.isfinite(limit):
        return None
    bytes_ = np.asarray(crossing, float)
    usual = max(float(np.median(bytes_[1:])) if n > 1 else 0.0, 1.0)
    best = np.full((parts + 1, n + 1), np.inf)
    first = np.zeros((parts + 1, n + 1), int)
    best[0, 0] = 0.0
    for p in range(1, parts + 1):
        for ends, work in runs.blocks():
            # Bytes in units of a usual boundary; between alike ones the more even parts.
            starts = slice(0, work.shape[1])
            paid = best[p - 1, starts] + bytes_[starts] / usual + (work / limit if limit else work) ** 2
            paid[work > limit] = np.inf
            first[p, ends] = np.argmin(paid, axis=1)
            best[p, ends] = np.min(paid, axis=1)
    bounds, end = [], n
    for p in range(parts, 1, -1):
        end = int(first[p, end])
        bounds.append(end)
    return bounds[::-1]


def largest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    """The cost of the largest of the parts that start at 0 and at `bounds`."""
    ends = [*bounds, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip([0, *bounds], ends, strict=True))


class _Runs:
    """What every run of units costs that a part may be."""

    def __init__(self, costs: Sequence[float], fixed: Mapping[int, bool]):
        self._units = len(costs)
        self._before = np.concatenate([[0.0], np.cumsum(costs)])
        self._allowed = np.array([fixed.get(u, True) for u in range(self._units)], bool)
        # the last unit before each end at which a part must start: no run goes over it
        must = [0] + [u if fixed.get(u, False) else 0 for u in range(self._units)]
        self._earliest = np.maximum.accumulate(must)

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Some ends, and the costs of the runs to before each of them, a row for an end and a column for the unit that
        a run starts at; infinite where no part may be that run."""
        rows = max(1, _AT_ONCE // max(self._units, 1))
        for low in range(1, self._units + 1, rows):
            ends = np.arange(low, min(low + rows, self._units + 1))[:, None]
            starts = np.arange(ends[-1, 0])
            may = self._allowed[starts] & (starts >= self._earliest[ends]) & (starts < ends)
            yield (
                slice(low, low + len(ends)),
                np.where(may, self._before[ends] - self._before[starts], np.inf),
            )

    def least_largest(self, parts: int) -> float:
        """The smallest possible cost of the largest of `parts` runs that are all units."""
        least = np.full(self._units + 1, np.inf)
        least[0] = 0.0
        for _ in range(parts):
            now = np.full(self._units + 1, np.inf)
            for ends, work in self.blocks():
                now[ends] = np.min(np.maximum(least[: work.shape[1]], work), axis=1)
            least = now
        return float(least[-1])
