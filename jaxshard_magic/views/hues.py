"""Hue and dash pattern of a mesh axis, chosen by its job, so that an axis looks the same in every view.

The browser has the same rule in `shared/axes.js`; `tests/data/axis_hues.json` has the cases of both.
"""

from collections.abc import Iterable

from ..config.strategies import AXIS_JOBS, job_of

HUES = 8
# Hues for further axes, in this order: those of no job first.
_FREE = (
    *range(len(AXIS_JOBS), HUES),
    *reversed(range(len(AXIS_JOBS))),
)


def hues(axes: Iterable[str]) -> dict[str, int]:
    """Number the axes of one mesh or one view without duplicates.

    The first axis of a job gets the job's hue; other axes get the remaining numbers in order. `number % HUES` is the
    hue. From `HUES` on, a hue repeats with another dash pattern.

    >>> hues(["replica", "data", "model", "x"])
    {'replica': 0, 'data': 6, 'model': 1, 'x': 7}
    """
    numbers: dict[str, int | None] = {}
    for axis in dict.fromkeys(axes):
        job = job_of(axis)
        hue = None if job is None else AXIS_JOBS[job].hue
        numbers[axis] = None if hue in numbers.values() else hue
    rest = [axis for axis, number in numbers.items() if number is None]
    left = [number for number in _FREE if number not in numbers.values()]
    left += range(HUES, HUES + len(rest))
    fallback = dict(zip(rest, left, strict=False))
    return {axis: fallback[axis] if number is None else number for axis, number in numbers.items()}
