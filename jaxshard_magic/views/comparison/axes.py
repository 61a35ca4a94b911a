"""Where the points of a comparison's chart stand: round values in one unit around all of them, and a plane in px."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from jaxshard_magic.views.comparison.data import Point
from jaxshard_magic.views.format import BYTE_UNITS, SECOND_UNITS, SPACE, byte_parts, seconds_text

TICKS = 5  # steps at most
AIR = 0.08  # of the range of values, on either side
NEAR_LIMIT = 1.25  # a limit up to so many times the largest peak is in the plot


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, which are multiples of `step`; `scale` of them is one of `unit`."""

    low: float
    high: float
    step: float
    scale: float
    unit: str

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Each with its text."""
        first, last = round(self.low / self.step), round(self.high / self.step)
        return [(i * self.step, f"{i * self.step / self.scale:g}") for i in range(first, last + 1)]

    def share(self, value: float) -> float:
        """Where a value lies on the axis: 0 at its low end, 1 at its high one."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Plane:
    """Seconds and bytes in px: `width` and `height` of the whole, and what is left free on each side."""

    seconds: Axis
    bytes: Axis
    width: float
    height: float
    left: float
    up: float
    aside: float
    below: float

    def x(self, seconds: float) -> float:
        """Px from the left."""
        return self.left + self.seconds.share(seconds) * (self.right - self.left)

    def y(self, peak: float) -> float:
        """Px from the top."""
        return self.floor - self.bytes.share(peak) * (self.floor - self.up)

    @property
    def right(self) -> float:
        """Px from the left to the right end of the plot."""
        return self.width - self.aside

    @property
    def floor(self) -> float:
        """Px from the top to the low end of the plot."""
        return self.height - self.below

    def stairs(self, front: Sequence[Point]) -> list[tuple[float, float]]:
        """The corners of the line through the front, from the plane's top to its right; none without points."""
        ordered = sorted(front, key=lambda p: (p.seconds, p.peak))
        corners = [(self.x(point.seconds), self.up) for point in ordered[:1]]
        for point in ordered:
            x = self.x(point.seconds)
            corners += [(x, corners[-1][1]), (x, self.y(point.peak))]
        return [*corners, *((self.right, y) for _, y in corners[-1:])]


def axes(points: Sequence[Point], limit: int | None) -> tuple[Axis, Axis]:
    """Those of seconds and of bytes; a memory limit that is near the points is among the bytes."""
    times = [t for p in points for t in (p.seconds, p.tail) if t is not None]
    peaks = [float(point.peak) for point in points]
    if limit is not None and limit <= NEAR_LIMIT * max(peaks):
        peaks.append(limit)
    unit, size = seconds_text(max(times)).rpartition(SPACE)[2], byte_parts(round(max(peaks)))[1]
    seconds = 1000.0 ** (SECOND_UNITS.index(unit) - len(SECOND_UNITS) + 1)
    return _around(times, seconds, unit), _around(peaks, 1024.0 ** BYTE_UNITS.index(size), size)


def _around(values: Sequence[float], scale: float, unit: str) -> Axis:
    low, high = min(values), max(values)
    room = AIR * (high - low) or 0.1 * high or scale
    low, high = max(0.0, low - room), high + room
    size = 10.0 ** floor(log10((high - low) / scale / TICKS)) * scale
    step = next(k * size for k in (1, 2, 5, 10, 20) if (high - low) / (k * size) <= TICKS)
    return Axis(step * floor(low / step + 1e-9), step * ceil(high / step - 1e-9), step, scale, unit)
