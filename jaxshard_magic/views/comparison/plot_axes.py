"""Axes of a comparison's chart: round values in one unit around all points, and their projection to px."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from jaxshard_magic.views.comparison.data import TrialPoint
from jaxshard_magic.views.format import BYTE_UNITS, SECOND_UNITS, SPACE, byte_parts, seconds_text

TICKS = 5  # steps of an axis, at most; one more if its ends are rounded outwards
AIR = 0.08  # space at either end, as a share of the range of values
NEAR_LIMIT = 1.25  # a limit up to this multiple of the largest peak is in the plot


@dataclass(frozen=True)
class PlotAxis:
    """Axis of a chart.

    Attributes:
        low: First value, a multiple of `step`.
        high: Last value, a multiple of `step`.
        step: Distance of ticks.
        scale: Size of one `unit`, in seconds or bytes.
        unit: Unit of tick labels.
    """

    low: float
    high: float
    step: float
    scale: float
    unit: str

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Ticks as (value, label) pairs."""
        first, last = round(self.low / self.step), round(self.high / self.step)
        return [(i * self.step, f"{i * self.step / self.scale:g}") for i in range(first, last + 1)]

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at the low end, 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class PlotArea:
    """Plot of bytes against seconds, in px.

    Attributes:
        seconds: Horizontal axis.
        bytes: Vertical axis.
        width: Width of the whole drawing.
        height: Height of the whole drawing.
        margin_left: Space left of the plot.
        margin_top: Space above the plot.
        margin_right: Space right of the plot.
        margin_bottom: Space below the plot.
    """

    seconds: PlotAxis
    bytes: PlotAxis
    width: float
    height: float
    margin_left: float
    margin_top: float
    margin_right: float
    margin_bottom: float

    def x(self, seconds: float) -> float:
        """Return px from the left edge of the drawing."""
        return self.margin_left + self.seconds.share(seconds) * (self.right - self.margin_left)

    def y(self, peak: float) -> float:
        """Return px from the top edge of the drawing."""
        return self.floor - self.bytes.share(peak) * (self.floor - self.margin_top)

    @property
    def right(self) -> float:
        """Px from the left edge of the drawing to the right end of the plot."""
        return self.width - self.margin_right

    @property
    def floor(self) -> float:
        """Px from the top edge of the drawing to the low end of the plot."""
        return self.height - self.margin_bottom

    def stairs(self, front: Sequence[TrialPoint]) -> list[tuple[float, float]]:
        """Return the corners of the staircase through the Pareto front, from the top of the plot to its right end.

        The result is empty without points.
        """
        ordered = sorted(front, key=lambda p: (p.seconds, p.peak))
        corners = [(self.x(point.seconds), self.margin_top) for point in ordered[:1]]
        for point in ordered:
            x = self.x(point.seconds)
            corners += [(x, corners[-1][1]), (x, self.y(point.peak))]
        return [*corners, *((self.right, y) for _, y in corners[-1:])]


def axes_for(points: Sequence[TrialPoint], limit: int | None) -> tuple[PlotAxis, PlotAxis]:
    """Return the axes of seconds and of bytes.

    Args:
        points: Points of the chart, at least one.
        limit: Memory limit in bytes. A limit up to 1.25 times the largest peak is included in the axis.
    """
    times = [t for p in points for t in (p.seconds, p.predicted) if t is not None]
    peaks = [float(point.peak) for point in points]
    if limit is not None and limit <= NEAR_LIMIT * max(peaks):
        peaks.append(limit)
    unit, size = seconds_text(max(times)).rpartition(SPACE)[2], byte_parts(round(max(peaks)))[1]
    seconds = 1000.0 ** (SECOND_UNITS.index(unit) - len(SECOND_UNITS) + 1)
    # Ticks have the units in which other views print the largest values.
    return _around(times, seconds, unit), _around(peaks, 1024.0 ** BYTE_UNITS.index(size), size)


def _around(values: Sequence[float], scale: float, unit: str) -> PlotAxis:
    """Return an axis with padding on both sides, about `TICKS` steps at most, and ends at round values.

    Args:
        values: Values to show, in seconds or bytes.
        scale: Size of one unit.
        unit: Name of the unit.
    """
    low, high = min(values), max(values)
    padding = AIR * (high - low) or 0.1 * high or scale
    low, high = max(0.0, low - padding), high + padding
    size = 10.0 ** floor(log10((high - low) / scale / TICKS)) * scale
    step = next(k * size for k in (1, 2, 5, 10, 20) if (high - low) / (k * size) <= TICKS)
    # 1e-9: a quotient that is whole but for rounding must not add a step.
    return PlotAxis(step * floor(low / step + 1e-9), step * ceil(high / step - 1e-9), step, scale, unit)
