"""Where a row of units is cut into parts: the largest as small as can be, then where few bytes cross."""

from collections.abc import Mapping, Sequence

import numpy as np

SLACK = 0.08  # what the largest part may exceed the smallest possible largest by, for fewer bytes to cross


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
    before = np.concatenate([[0.0], np.cumsum(costs)])
    starts = _Starts(n, fixed)
    limit = _least_largest(before, starts, parts) * (1 + SLACK)
    if not np.isfinite(limit):
        return None
    bytes_ = np.asarray(crossing, float)
    usual = max(float(np.median(bytes_[1:])) if n > 1 else 0.0, 1.0)
    best = np.full((parts + 1, n + 1), np.inf)
    first = np.zeros((parts + 1, n + 1), int)
    best[0, 0] = 0.0
    for p in range(1, parts + 1):
        for end in range(p, n + 1):
            work = before[end] - before[:end]
            # Bytes in units of a usual boundary; between alike ones the more even parts.
            paid = best[p - 1, :end] + bytes_[:end] / usual + (work / limit if limit else work) ** 2
            paid[(work > limit) | ~starts(end)] = np.inf
            first[p, end] = int(np.argmin(paid))
            best[p, end] = paid[first[p, end]]
    bounds, end = [], n
    for p in range(parts, 1, -1):
        end = int(first[p, end])
        bounds.append(end)
    return bounds[::-1]


def largest(costs: Sequence[float], bounds: Sequence[int]) -> float:
    """The cost of the largest of the parts that start at 0 and at `bounds`."""
    ends = [*bounds, len(costs)]
    return max(sum(costs[a:b]) for a, b in zip([0, *bounds], ends, strict=True))


class _Starts:
    """`starts(end)[u]`: whether a part may run from unit u to before `end`."""

    def __init__(self, units: int, fixed: Mapping[int, bool]):
        self._allowed = np.array([fixed.get(u, True) for u in range(units)])
        self._forced = sorted(u for u, cut in fixed.items() if cut)

    def __call__(self, end: int) -> np.ndarray:
        allowed = self._allowed[:end].copy()
        allowed[: max((u for u in self._forced if u < end), default=0)] = False
        return allowed


def _least_largest(before: np.ndarray, starts: _Starts, parts: int) -> float:
    """The smallest possible cost of the largest of `parts` runs of units; `before[u]`: the cost of what is before u."""
    n = len(before) - 1
    least = np.full(n + 1, np.inf)
    least[0] = 0.0
    for p in range(1, parts + 1):
        now = np.full(n + 1, np.inf)
        for end in range(p, n + 1):
            paid = np.maximum(least[:end], before[end] - before[:end])
            now[end] = np.min(paid[starts(end)], initial=np.inf)
        least = now
    return float(least[n])
