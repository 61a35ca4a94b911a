"""Which hue and dash pattern a mesh axis has: its job's, as its name tells that, so that it is the same in every view.

The browser's `shared/axes.js` decides just so; `tests/data/axis_hues.json` has the cases of both.
"""

from collections.abc import Iterable

from ..config.strategies import AXIS_JOBS, job_of

HUES = 8
_FREE = (
    *range(len(AXIS_JOBS), HUES),
    *reversed(range(len(AXIS_JOBS))),
)  # what further axes take, those of no job first


def hues(axes: Iterable[str]) -> dict[str, int]:
    """A number for each of `axes`, which are of one mesh or stand in one view; no two are alike.

    The first axis of a job has its hue, others take what is left, in order. `number % HUES` is the hue; from `HUES` on
    it comes with another dash pattern.

    >>> hues(["replica", "data", "model", "x"])
    {'replica': 0, 'data': 6, 'model': 1, 'x': 7}
    """
    found: dict[str, int | None] = {}
    for axis in dict.fromkeys(axes):
        job = job_of(axis)
        hue = None if job is None else AXIS_JOBS[job].hue
        found[axis] = None if hue in found.values() else hue
    rest = [axis for axis, number in found.items() if number is None]
    left = [number for number in _FREE if number not in found.values()]
    left += range(HUES, HUES + len(rest))
    given = dict(zip(rest, left, strict=False))
    return {axis: given[axis] if number is None else number for axis, number in found.items()}
