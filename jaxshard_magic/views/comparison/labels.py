"""Where the names of a comparison's points stand in its chart: none covers another, nor a point, a tail or a line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxshard_magic.views.chart_labels import Box, named
from jaxshard_magic.views.comparison.axes import Plane
from jaxshard_magic.views.comparison.data import Point
from jaxshard_magic.views.format import limit_text, printable
from jaxshard_magic.views.terminal import cells, clip

LINE, CHARACTER = 13, 6.7  # of letters, in px
MOST_LETTERS = 36
ROOM = 6.0  # px around the middle of a point that are its own
DOTS = 24  # that a line to a name is looked at as


@dataclass(frozen=True)
class Label:
    """A point's name in `box`, `place` of it as plotly says it. `end` of a line from the point, where the name does not
    stand beside it."""

    point: Point
    text: str
    box: Box
    place: str = ""
    end: tuple[float, float] | None = None


def labels(plane: Plane, points: Sequence[Point], limit: int | None) -> list[Label]:
    """The names that have room. Those on the front go first, and may stand farther away."""
    front = [point for point in points if point.on_front]
    taken = [*_points(plane, points), *_front(plane, front), *_limit(plane, limit)]
    placed: list[Label] = []
    for point in sorted(points, key=lambda p: not p.on_front):
        text = clip(printable(named(point.names, MOST_LETTERS)), MOST_LETTERS)
        x, y, width = plane.x(point.seconds), plane.y(point.peak), CHARACTER * cells(text)
        near = _near(x, y, width, above=point.on_front)
        here = next(((place, box) for place, box in near if _free(plane, box, taken)), None)
        if here is not None:
            placed.append(Label(point, text, here[1], here[0]))
            taken.append(here[1])
        elif point.on_front:
            tried = ((box, _line_to(x, y, box)) for box in _far(x, y, width) if _free(plane, box, taken))
            there = next((each for each in tried if not _cross(each[1], placed)), None)
            if there is not None:
                box, dots = there
                placed.append(Label(point, text, box, end=(dots[-1].x, dots[-1].y)))
                taken += [box, *dots]
    return placed


def _near(x: float, y: float, width: float, *, above: bool) -> Iterator[tuple[str, Box]]:
    """Where the name of a point at (x, y) may stand beside it, the best first."""
    heights = {"middle": y - LINE / 2, "top": y - LINE - 4, "bottom": y + 4}
    order = ("top", "middle", "bottom") if above else tuple(heights)
    for side, at in (("right", x + 9), ("left", x - 9 - width)):
        for place in order:
            yield f"{place} {side}", Box(at, heights[place], width, LINE)


def _far(x: float, y: float, width: float) -> list[Box]:
    return [
        Box(at, y + LINE * i - LINE / 2, width, LINE)
        for i in (-2, 2, -3, 3, -4, 4)
        for at in (x + 16, x - 16 - width)
    ]


def _line_to(x: float, y: float, box: Box) -> list[Box]:
    """The line from a point to its name, as dots of which the last is its end."""
    end_x, end_y = box.x - 2 if box.x > x else box.x + box.width + 2, box.y + LINE / 2
    return [
        Box(x + (end_x - x) * i / DOTS, y + (end_y - y) * i / DOTS, 1, 1) for i in range(DOTS // 3, DOTS + 1)
    ]


def _cross(dots: Sequence[Box], names: Sequence[Label]) -> bool:
    return any(name.box.meets(dot) for name in names for dot in dots)


def _free(plane: Plane, box: Box, taken: Sequence[Box]) -> bool:
    """Whether a box is inside the plane and covers nothing."""
    across = plane.left + 2 <= box.x and box.x + box.width <= plane.right - 2
    return across and plane.up <= box.y <= plane.floor - LINE and not any(map(box.meets, taken))


def _points(plane: Plane, points: Sequence[Point]) -> Iterator[Box]:
    """What points and their tails cover."""
    for point in points:
        x, y = plane.x(point.seconds), plane.y(point.peak)
        yield Box(x - ROOM, y - ROOM, 2 * ROOM, 2 * ROOM)
        if point.tail is not None:
            start = plane.x(point.tail)
            yield Box(min(x, start), y - 1, abs(x - start), 2)


def _front(plane: Plane, front: Sequence[Point]) -> Iterator[Box]:
    """What the line of the front covers."""
    for (x0, y0), (x1, y1) in pairwise(plane.stairs(front)):
        yield Box(min(x0, x1) - 1, min(y0, y1) - 1, abs(x1 - x0) + 2, abs(y1 - y0) + 2)


def _limit(plane: Plane, limit: int | None) -> Iterator[Box]:
    if limit is not None and plane.bytes.low <= limit <= plane.bytes.high:
        y, width = plane.y(limit), CHARACTER * len(f"limit {limit_text(limit)}")
        yield Box(plane.left, y - 1, plane.right - plane.left, 2)
        yield Box(plane.right - width, y - LINE - 4, width, LINE)
