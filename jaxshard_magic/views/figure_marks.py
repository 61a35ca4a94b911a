"""Small drawings below the key figures, as data with their scale.

Footgun: the payload sends class and field names to the browser, so a renamed field needs a change there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from jaxshard_magic.report import Report
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views import device_memory, words


@dataclass(frozen=True)
class Range:
    """Step times on a chip in seconds.

    Attributes:
        min: Shortest step.
        median: Median step.
        max: Longest step.
        predicted: Predicted step; None if unknown.
    """

    min: float
    median: float
    max: float
    predicted: float | None


@dataclass(frozen=True)
class Share:
    """Peak memory relative to the limit.

    Attributes:
        share: Above 1 the step does not fit.
    """

    share: float


@dataclass(frozen=True)
class Axes:
    """Bytes sent over each set of mesh axes, relative to all bytes.

    Attributes:
        parts: (axes, share); None stands for groups that follow no axes.
    """

    parts: tuple[tuple[tuple[str, ...] | None, float], ...]


@dataclass(frozen=True)
class Limit:
    """Largest difference of the numerical check and its limit.

    Attributes:
        value: Largest difference.
        limit: Largest permitted difference.
        ok: True if the check passed.
    """

    value: float
    limit: float
    ok: bool


# The browser has a drawing for each class, found by the name of the class.
Mark = Range | Share | Axes | Limit


def marks(report: Report) -> tuple[Mark | None, ...]:
    """Return a drawing for each of `words.key_figures_of`, None for a figure without one."""
    if not report.of_step:
        return ()
    return _range(report), _share(report), _axes(report), None, _limit(report)


def _range(report: Report) -> Range | None:
    timing = report.timing
    spread = words.chip_step_time(report)
    if timing is None or spread is None or not _finite((spread.min, spread.median, spread.max)):
        return None
    return Range(spread.min, spread.median, spread.max, finite_or_none(timing.predicted_step_s))


def _share(report: Report) -> Share | None:
    fullest = device_memory.fullest(report.memory)
    if report.memory is None or fullest is None or fullest.peak is None:
        return None
    most = device_memory.limit(report.memory)
    return Share(fullest.peak / most) if most else None


def _axes(report: Report) -> Axes | None:
    total = words.sent_bytes(report)
    if not total:
        return None
    parts = words.sent_by_axes(report.collectives or ())
    return Axes(tuple((axes, size / total) for axes, size in parts.items()))


def _limit(report: Report) -> Limit | None:
    check = report.check
    value = words.largest_difference(check) if check else None
    if check is None or value is None or not _finite((value, check.limit)):
        return None
    return Limit(value, check.limit, check.passed)


def _finite(values: Sequence[float]) -> bool:
    return all(map(isfinite, values))
