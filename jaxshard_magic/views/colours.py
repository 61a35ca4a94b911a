"""Colours of all views: a set for light backgrounds, a set for dark ones, one legible on both; hues of mesh axes.

A hue stands for a mesh axis, a memory role, a kind of pipeline action (`on-F` is the text colour on `F`), or a kind of
recorded time, by the letters of `words.TIME_KINDS`. Text has a contrast of at least 4.5 against its background, marks
of 3.

The hue and the dash pattern of a mesh axis are chosen by its job, so that an axis looks the same in every view. The
browser has the same rule in `shared/axes.js`; `tests/data/axis_hues.json` has the cases of both.
"""

from collections.abc import Iterable

from jaxshard_magic.config.strategies import AXIS_JOBS, job_of

SPENT = "RUOMX"  # kinds of time of a recorded step, besides F and B
ROLES = ("params", "optimizer", "batch", "temporaries")

LIGHT = {
    "bg": "#fff",
    "ink": "#1c2024",
    "ink-2": "#545c65",
    "line": "rgba(20,30,40,.14)",
    "a0": "#2a69b5",
    "a1": "#aa4d0c",
    "a2": "#00594f",
    "a3": "#651a86",
    "a4": "#b52b72",
    "a5": "#4d4b00",
    "a6": "#377024",
    "a7": "#346677",
    "params": "#17347f",
    "optimizer": "#5c6fd0",
    "batch": "#c26f00",
    "temporaries": "#858e98",
    "other": "#545c65",
    "F": "#1f5ea8",
    "B": "#7a5a9e",
    "I": "#cc7f00",
    "W": "#419f84",
    "R": "#cc7f00",
    "U": "#419f84",
    "O": "#545c65",
    "M": "#b52b72",
    "X": "#858e98",
    "on-F": "#fff",
    "on-B": "#fff",
    "on-I": "#14171a",
    "on-W": "#14171a",
    "warning": "#8f5a00",
    "error": "#b3261e",
    "ok": "#0a7562",
    "info": "#2468b4",
}
DARK = {
    "bg": "#111",
    "ink": "#e8eaed",
    "ink-2": "#b2b9c1",
    "line": "rgba(255,255,255,.17)",
    "a0": "#82b6ff",
    "a1": "#f5995a",
    "a2": "#6fe8d4",
    "a3": "#bd95d2",
    "a4": "#ff86bd",
    "a5": "#ece66f",
    "a6": "#7dbb55",
    "a7": "#8aa6b5",
    "params": "#b4ccff",
    "optimizer": "#7f8ff0",
    "batch": "#f0ae48",
    "temporaries": "#737a82",
    "other": "#b2b9c1",
    "F": "#4f95e6",
    "B": "#b79ad8",
    "I": "#f2b544",
    "W": "#a5e3cb",
    "R": "#f2b544",
    "U": "#a5e3cb",
    "O": "#b2b9c1",
    "M": "#ff86bd",
    "X": "#737a82",
    "on-F": "#14171a",
    "on-B": "#14171a",
    "on-I": "#14171a",
    "on-W": "#14171a",
    "warning": "#e8b14c",
    "error": "#ff8a80",
    "ok": "#5fd0b4",
    "info": "#82b6ff",
}
THEMES = {"light": LIGHT, "dark": DARK}

# For HTML on a page that may be light or dark.
BOTH = {
    "a0": "#3f83d6",
    "a1": "#c8641f",
    "a2": "#1f8a78",
    "a3": "#9b62bd",
    "a4": "#d64a90",
    "a5": "#77721a",
    "a6": "#5f9a3a",
    "a7": "#5f8798",
    "params": "#4a63c8",
    "optimizer": "#8f82d6",
    "batch": "#b8740c",
    "temporaries": "#858e98",
    "F": "#3f83d6",
    "B": "#9b7cc4",
    "I": "#c9830f",
    "W": "#2f9c7c",
    "R": "#c9830f",
    "U": "#2f9c7c",
    "O": "#858e98",
    "M": "#d64a90",
    "X": "#8b8f94",
    "rule": "#7a828a",
    "limit": "#d9453b",
}
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
