"""Where a row of units is cut into parts: the largest as small as can be, then where few bytes cross."""

from collections.abc import Sequence

import numpy as np

from jaxshard_magic.errors import ShardError

SLACK = (
    0.08  # by how much the largest part may exceed the smallest possible largest, for fewer bytes to cross
)


def cut(costs: Sequence[float], crossing: Sequence[float], parts: int) -> list[int]:
    """The first unit of each part after the first, ascending, `parts - 1` of them.

    Args:
        costs: what each unit costs, in any unit, none below 0.
        crossing: `crossing[u]` is the bytes that cross a boundary before unit u.
        parts: how many, each of at least one unit.

    Raises ShardError where there are fewer units than parts.

    >>> cut([1, 1, 1, 1], [0, 9, 1, 9], 2)
    [2]
    """
    n = len(costs)
    if n < parts:
        raise ShardError(f"{n} places to cut a step into {parts} stages; use at most {max(n, 1)}")
    before = np.concatenate([[0.0], np.cumsum(costs)])
    limit = _least_largest(before, parts) * (1 + SLACK)
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
            paid[work > limit] = np.inf
            first[p, end] = int(np.argmin(paid))
            best[p, end] = paid[first[p, end]]
    found, end = [], n
    for p in range(parts, 1, -1):
        end = int(first[p, end])
        found.append(end)
    return found[::-1]


def _least_largest(before: np.ndarray, parts: int) -> float:
    """The smallest possible cost of the largest of `parts` runs of units; `before[u]`: the cost of all before unit u."""
    n = len(before) - 1
    largest = np.full(n + 1, np.inf)
    largest[0] = 0.0
    for p in range(1, parts + 1):
        now = np.full(n + 1, np.inf)
        for end in range(p, n + 1):
            now[end] = np.min(np.maximum(largest[:end], before[end] - before[:end]))
        largest = now
    return float(largest[n])
