"""Two small charts of compared schedules: bubble against microbatches, and against what a rank holds.

Ink and dashes tell the schedules apart, and each line and point has its name beside it: hue is a mesh axis elsewhere.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import TYPE_CHECKING, NamedTuple

from jaxshard_magic.views import words
from jaxshard_magic.views.chart_labels import Box, named
from jaxshard_magic.views.svg import DASHES, drawing, label, number

if TYPE_CHECKING:
    from jaxshard_magic.schedule.compare import Row

WIDTH, HEIGHT = 412, 236
LEFT, RIGHT, TOP, BOTTOM = 38, 116, 10, 36
SIZE, LINE, CHARACTER = 11, 13, 6.0  # of letters, in px
MOST_LETTERS = 19
_INK = 'stroke="currentColor" fill="none"'


class Point(NamedTuple):
    """Schedules that stand at the same place: what they hold, and their bubble."""

    held: float
    bubble: float
    steady: float
    names: tuple[str, ...]
    on_front: bool


@dataclass(frozen=True)
class _Plane:
    """Where values stand: x from `low` to `high`, y from 0 to `top`."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - BOTTOM - TOP)


def bubbles(rows: Sequence["Row"], microbatches: int) -> str:
    """Each schedule's bubble against the microbatches, on a scale that doubles; a dot at the number asked for."""
    curves = _curves(rows)
    if not curves:
        return ""
    numbers = sorted({at for curve in curves for at, _ in curve})
    step, top = _scale(max(bubble for curve in curves for _, bubble in curve))
    plane = _Plane(log2(numbers[0]), log2(numbers[-1]), top)
    marks = [
        *_bubble_axis(plane, step),
        *_ticks([(plane.x(log2(at)), str(at)) for at in numbers], "microbatches"),
    ]
    ends = []
    for place, (curve, group) in enumerate(curves.items()):
        on_front = any(row.on_front for row in group)
        path = [(plane.x(log2(at)), plane.y(bubble)) for at, bubble in curve]
        marks.append(_line(path, on_front, place))
        marks += [_dot(*path[i], on_front) for i, (at, _) in enumerate(curve) if at == microbatches]
        ends.append((path[-1], named((row.name for row in group), MOST_LETTERS), on_front))
    marks += _beside(ends)
    names = ", ".join(row.name for group in curves.values() for row in group)
    return drawing(WIDTH, HEIGHT, f"bubble against microbatches: {names}", marks)


def memory(rows: Sequence["Row"], limit: float | None) -> str:
    """Each schedule's bubble against what its fullest rank holds, on a scale that doubles.

    A line bounds what can be had. A tail reaches down to the bubble of steps that follow each other without a
    barrier, where that is smaller.
    """
    points = _points(rows)
    if not points:
        return ""
    held = [point.held for point in points] + ([limit] if limit else [])
    step, top = _scale(max(point.bubble for point in points))
    least, most = floor(log2(min(held))), ceil(log2(max(held)))
    plane = _Plane(least, max(most, least + 1), top)
    ticks = [(plane.x(power), f"{2.0**power:g}") for power in range(least, most + 1)]
    marks = [*_bubble_axis(plane, step), *_ticks(ticks, "microbatches held")]
    if limit is not None:
        x = number(plane.x(log2(limit)))
        marks.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" {_INK} stroke-dasharray="2 3"/>')
    marks.append(_staircase(plane, [point for point in points if point.on_front]))
    for point in points:
        x, y = plane.x(log2(point.held)), plane.y(point.bubble)
        if point.bubble - point.steady > 0.0005:
            low = number(plane.y(point.steady))
            marks.append(f'<path d="M{number(x)} {number(y)}V{low}m-4 0h8" {_INK} stroke-opacity=".6"/>')
        marks.append(_dot(x, y, point.on_front))
    marks += _labels(plane, points)
    told = "; ".join(f"{named(p.names, 99)} {words.percent_text(p.bubble)} at {p.held:g}" for p in points)
    return drawing(WIDTH, HEIGHT, f"bubble against microbatches held: {told}", marks)


def _curves(rows: Sequence["Row"]) -> dict[tuple[tuple[int, float], ...], list["Row"]]:
    """The rows by their curves, those that agree together."""
    curves: dict[tuple[tuple[int, float], ...], list[Row]] = {}
    for row in rows:
        if row.curve:
            curves.setdefault(tuple((at, round(bubble, 6)) for at, bubble in row.curve), []).append(row)
    return curves


def _points(rows: Sequence["Row"]) -> list[Point]:
    points: dict[tuple[float, float], list[Row]] = {}
    for row in rows:
        if row.bubble is not None and row.peak_microbatches is not None:
            points.setdefault((round(row.peak_microbatches, 6), round(row.bubble, 6)), []).append(row)
    return [
        Point(
            held,
            bubble,
            min(row.steady_bubble or 0.0 for row in group),
            tuple(row.name for row in group),
            any(row.on_front for row in group),
        )
        for (held, bubble), group in sorted(points.items())
    ]


def _nice(most: float) -> tuple[float, float]:
    """A round step, and its multiple that no value is above, in at most six steps."""
    if most <= 0:
        return 1.0, 1.0
    power = 10.0 ** (len(str(int(most))) - 2)
    step = next(each * power for each in (0.5, 1, 2, 2.5, 5, 10, 20) if each * power * 6 >= most)
    return step, step * ceil(most / step - 1e-9)


def _scale(most: float) -> tuple[float, float]:
    """Step and top of an axis of bubbles."""
    step, top = _nice(100 * most)
    return step / 100, top / 100


def _bubble_axis(plane: _Plane, step: float) -> Iterable[str]:
    for i in range(round(plane.top / step) + 1):
        y = plane.y(i * step)
        yield f'<path d="M{LEFT} {number(y)}H{WIDTH - RIGHT}" {_INK} stroke-opacity=".18"/>'
        yield label(LEFT - 6, y + 4, f"{100 * i * step:g}%", SIZE, ' text-anchor="end" fill-opacity=".8"')


def _ticks(places: Sequence[tuple[float, str]], name: str) -> Iterable[str]:
    right, middle = -1000.0, ' text-anchor="middle" fill-opacity=".8"'
    for x, tick in places:
        width = CHARACTER * len(tick)
        if x - width / 2 > right:
            yield label(x, HEIGHT - BOTTOM + 15, tick, SIZE, middle)
            right = x + width / 2 + 4
    yield label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, name, SIZE, middle)


def _line(path: Sequence[tuple[float, float]], on_front: bool, place: int) -> str:
    d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in path)
    dash = "" if on_front else f' stroke-dasharray="{DASHES[1 + place % 3]}" stroke-opacity=".7"'
    return f'<path d="{d}" {_INK} stroke-width="{2 if on_front else 1.25}"{dash}/>'


def _dot(x: float, y: float, on_front: bool) -> str:
    size, opacity = (4, "") if on_front else (3, ' fill-opacity=".7"')
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="{size}" fill="currentColor"{opacity}/>'


def _staircase(plane: _Plane, front: Sequence[Point]) -> str:
    """What can be had: from the point that holds least, down at each that has a smaller bubble."""
    if not front:
        return ""
    d = f"M{number(plane.x(log2(front[0].held)))} {TOP}V{number(plane.y(front[0].bubble))}"
    for point in front[1:]:
        d += f"H{number(plane.x(log2(point.held)))}V{number(plane.y(point.bubble))}"
    return f'<path d="{d}H{WIDTH - RIGHT}" {_INK} stroke-opacity=".55"/>'


def _bold(on_front: bool) -> str:
    return ' font-weight="600"' if on_front else ' fill-opacity=".8"'


def _beside(ends: Sequence[tuple[tuple[float, float], str, bool]]) -> Iterable[str]:
    """The names at the right of their lines, pushed apart where lines end close to each other."""
    ordered = sorted(ends, key=lambda end: end[0][1])
    places: list[float] = []
    for (_, y), _, _ in ordered:
        places.append(max(y, places[-1] + LINE) if places else max(y, TOP + 4))
    over = places[-1] - (HEIGHT - BOTTOM)
    for i in range(len(places) - 1, -1, -1):  # what was pushed below the chart pushes up
        ceiling = places[i + 1] - LINE if i + 1 < len(places) else places[i] - max(0.0, over)
        places[i] = min(places[i], ceiling)
    edge = WIDTH - RIGHT
    for ((x, y), name, on_front), place in zip(ordered, places, strict=True):
        if x < edge - 1 or abs(place - y) > 2:
            yield f'<path d="M{number(x + 5)} {number(y)}L{edge + 8} {number(place)}" {_INK} stroke-opacity=".3"/>'
        yield label(edge + 10, place + 4, name, SIZE, _bold(on_front))


def _labels(plane: _Plane, points: Sequence[Point]) -> Iterable[str]:
    """Each point's name beside it, where it covers neither another name nor a point."""
    dots = [Box(plane.x(log2(p.held)) - 4, plane.y(p.bubble) - 4, 8, 8) for p in points]
    taken: list[Box] = []
    for point in sorted(points, key=lambda p: not p.on_front):
        name = named(point.names, MOST_LETTERS)
        x, y, width = plane.x(log2(point.held)), plane.y(point.bubble), CHARACTER * len(name)
        right, left = x + 6, x - 6 - width
        tried = [
            Box(right, y - LINE - 1, width, LINE),
            Box(right, y + 2, width, LINE),
            Box(left, y - LINE - 1, width, LINE),
            Box(left, y + 2, width, LINE),
            *(Box(x + 14, y + LINE * i, width, LINE) for i in (-2.5, 1.5, -3.5, 2.5, -4.5, 3.5)),
        ]
        inside = [
            b for b in tried if b.x >= LEFT and b.x + width <= WIDTH and 0 <= b.y <= HEIGHT - BOTTOM - LINE
        ]
        box = next((b for b in inside if not any(map(b.meets, [*taken, *dots]))), tried[0])
        if box not in tried[:4]:
            line = f"M{number(x)} {number(y)}L{number(box.x - 2)} {number(box.y + LINE / 2)}"
            yield f'<path d="{line}" {_INK} stroke-opacity=".4"/>'
        taken.append(box)
        yield label(box.x, box.y + LINE - 3, name, SIZE, _bold(point.on_front))
