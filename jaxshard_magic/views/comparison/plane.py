"""Plane of a comparison's chart: axes with round values around all points, their projection to px, and positions of the
names, where no name covers another, a point, a tail or a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, log10

from jaxshard_magic.views.comparison.data import TrialPoint
from jaxshard_magic.views.format import BYTE_UNITS, SECOND_UNITS, SPACE, byte_parts, limit_text, printable, seconds_text
from jaxshard_magic.views.svg import Box, join_names
from jaxshard_magic.views.terminal import clip, display_width

TICKS = 5  # steps of an axis, at most; one more if its ends are rounded outwards
AIR = 0.08  # space at either end, as a share of the range of values
NEAR_LIMIT = 1.25  # a limit up to this multiple of the largest peak is in the plot
LINE, CHARACTER = 13, 6.7  # px: line height, mean width of a letter
MOST_LETTERS = 36
ROOM = 6.0  # px around the centre of a point, kept free of names
DOTS = 24  # boxes that stand for a line in tests for overlap


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


@dataclass(frozen=True)
class PointLabel:
    """Name of a point.

    Attributes:
        point: Named point.
        text: Shortened names of its trials.
        box: Area of the name.
        text_position: Position relative to the point as plotly's `textposition`; "" for a name at a distance.
        leader_end: End of the line from the point to a name at a distance; None for an adjacent name.
    """

    point: TrialPoint
    text: str
    box: Box
    text_position: str = ""
    leader_end: tuple[float, float] | None = None


def place_labels(plane: PlotArea, points: Sequence[TrialPoint], limit: int | None) -> list[PointLabel]:
    """Return the names that have room.

    Names of points on the front go first, and may stand at a distance from their points.

    Args:
        plane: Plot.
        points: All points of the chart.
        limit: Memory limit in bytes, None for no line.
    """
    front = [point for point in points if point.on_front]
    occupied = [*_points(plane, points), *_front(plane, front), *_limit(plane, limit)]
    placed: list[PointLabel] = []
    for point in sorted(points, key=lambda p: not p.on_front):
        text = clip(printable(join_names(point.names, MOST_LETTERS)), MOST_LETTERS)
        x, y, width = plane.x(point.seconds), plane.y(point.peak), CHARACTER * display_width(text)
        near = _near(x, y, width, above=point.on_front)
        adjacent = next(((place, box) for place, box in near if _free(plane, box, occupied)), None)
        if adjacent is not None:
            placed.append(PointLabel(point, text, adjacent[1], adjacent[0]))
            occupied.append(adjacent[1])
        elif point.on_front:
            candidates = ((box, _line_to(x, y, box)) for box in _far(x, y, width) if _free(plane, box, occupied))
            distant = next((each for each in candidates if not _cross(each[1], placed)), None)
            if distant is not None:
                box, dots = distant
                placed.append(PointLabel(point, text, box, leader_end=(dots[-1].x, dots[-1].y)))
                occupied += [box, *dots]
    return placed


def _near(x: float, y: float, width: float, *, above: bool) -> Iterator[tuple[str, Box]]:
    """Yield (position, box) beside a point, the best first.

    Args:
        x: Px of the point.
        y: Px of the point.
        width: Px of the name.
        above: Whether positions above the point are preferred, as for points on the front.
    """
    heights = {"middle": y - LINE / 2, "top": y - LINE - 4, "bottom": y + 4}
    # The staircase of the front comes to a point from above and leaves it to the right: the area between is free.
    order = ("top", "middle", "bottom") if above else tuple(heights)
    for side, at in (("right", x + 9), ("left", x - 9 - width)):
        for place in order:
            yield f"{place} {side}", Box(at, heights[place], width, LINE)


def _far(x: float, y: float, width: float) -> list[Box]:
    """Return boxes two to four lines above or below a point."""
    return [
        Box(at, y + LINE * i - LINE / 2, width, LINE) for i in (-2, 2, -3, 3, -4, 4) for at in (x + 16, x - 16 - width)
    ]


def _line_to(x: float, y: float, box: Box) -> list[Box]:
    """Return the line from a point to its name as dots; the last dot is its end."""
    end_x, end_y = box.x - 2 if box.x > x else box.x + box.width + 2, box.y + LINE / 2
    return [Box(x + (end_x - x) * i / DOTS, y + (end_y - y) * i / DOTS, 1, 1) for i in range(DOTS // 3, DOTS + 1)]


def _cross(dots: Sequence[Box], names: Sequence[PointLabel]) -> bool:
    """Return whether a line of dots crosses a name."""
    return any(name.box.overlaps(dot) for name in names for dot in dots)


def _free(plane: PlotArea, box: Box, taken: Sequence[Box]) -> bool:
    """Return whether a box is inside the plot and covers nothing."""
    across = plane.margin_left + 2 <= box.x and box.x + box.width <= plane.right - 2
    return across and plane.margin_top <= box.y <= plane.floor - LINE and not any(map(box.overlaps, taken))


def _points(plane: PlotArea, points: Sequence[TrialPoint]) -> Iterator[Box]:
    """Yield the areas covered by points and tails."""
    for point in points:
        x, y = plane.x(point.seconds), plane.y(point.peak)
        yield Box(x - ROOM, y - ROOM, 2 * ROOM, 2 * ROOM)
        if point.predicted is not None:
            start = plane.x(point.predicted)
            yield Box(min(x, start), y - 1, abs(x - start), 2)


def _front(plane: PlotArea, front: Sequence[TrialPoint]) -> Iterator[Box]:
    """Yield the areas covered by the line of the front."""
    for (x0, y0), (x1, y1) in pairwise(plane.stairs(front)):
        yield Box(min(x0, x1) - 1, min(y0, y1) - 1, abs(x1 - x0) + 2, abs(y1 - y0) + 2)


def _limit(plane: PlotArea, limit: int | None) -> Iterator[Box]:
    """Yield the areas covered by the line of the limit and its label, if inside the plot."""
    if limit is not None and plane.bytes.low <= limit <= plane.bytes.high:
        y, width = plane.y(limit), CHARACTER * len(f"limit {limit_text(limit)}")
        yield Box(plane.margin_left, y - 1, plane.right - plane.margin_left, 2)
        yield Box(plane.right - width, y - LINE - 4, width, LINE)
