"""The small drawings under the key figures, as data: what each of them shows and on which scale."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from jaxshard_magic.report import Report
from jaxshard_magic.report.parts import finite
from jaxshard_magic.views import device_memory, words


@dataclass(frozen=True)
class Range:
    """The spread of the step's time in seconds as a chip ran it, and the predicted one."""

    min: float
    median: float
    max: float
    predicted: float | None


@dataclass(frozen=True)
class Share:
    """Peak memory as a share of the limit; above 1 it does not fit."""

    share: float


@dataclass(frozen=True)
class Axes:
    """What is sent over each set of mesh axes, as shares of all; None stands for groups that follow no axes."""

    parts: tuple[tuple[tuple[str, ...] | None, float], ...]


@dataclass(frozen=True)
class Limit:
    """The difference of the check against what it may be."""

    value: float
    limit: float
    ok: bool


Mark = Range | Share | Axes | Limit


def marks(report: Report) -> tuple[Mark | None, ...]:
    """One for each of `words.figures`, None where a figure has nothing to draw."""
    if not report.of_step:
        return ()
    return _range(report), _share(report), _axes(report), None, _limit(report)


def _range(report: Report) -> Range | None:
    timing = report.timing
    spread = words.on_chip(report)
    if timing is None or spread is None or not _finite((spread.min, spread.median, spread.max)):
        return None
    return Range(spread.min, spread.median, spread.max, finite(timing.predicted_step_s))


def _share(report: Report) -> Share | None:
    fullest = device_memory.fullest(report.memory)
    if report.memory is None or fullest is None or fullest.peak is None:
        return None
    most = device_memory.limit(report.memory)
    return Share(fullest.peak / most) if most else None


def _axes(report: Report) -> Axes | None:
    total = words.sent(report)
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
