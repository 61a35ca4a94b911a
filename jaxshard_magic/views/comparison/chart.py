"""The chart of a comparison: peak memory against step time, with the Pareto front.

Trials on the front are solid; a tail starts at the step time that was predicted. A name stands where it covers neither
another name nor a mark; what has no room for one is in the table.
"""

from collections.abc import Iterator, Sequence
from html import escape

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views import words
from jaxshard_magic.views.chart_labels import named
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison.axes import Plane, axes
from jaxshard_magic.views.comparison.labels import LINE, Label, labels
from jaxshard_magic.views.format import byte_text, count_text, limit_text, more_text, printable, seconds_text
from jaxshard_magic.views.svg import LIMIT, drawing, label, number
from jaxshard_magic.views.tags import unbroken

WIDTH, HEIGHT, MORE_HEIGHT = 584, 248, 340
CROWD = 12  # points, from which on the chart is higher
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 22, 36
SIZE, RADIUS = 11, 4.5  # of letters and points, in px
MOST_NAMED = 6  # on the front
_INK = 'stroke="currentColor" fill="none"'
_MONO = ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"'


def scatter(comparison: Comparison) -> str:
    """The chart with a line on how to read it; empty for fewer than two points."""
    chart, unnamed = drawn(comparison)
    if not chart:
        return ""
    read = "<br>".join(_how_to_read(comparison, data.points_of(comparison), unnamed))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 20px;margin:12px 0">'
        f'<div>{chart}</div><div style="flex:1 1 230px"><small>{read}</small></div></div>'
    )


def drawn(comparison: Comparison) -> tuple[str, int]:
    """The chart alone, as one `<svg>`, and how many points have no room for their name; empty for fewer than two."""
    points = data.points_of(comparison)
    if len(points) < 2:
        return "", 0
    limit = data.limit_of(comparison)
    plane = Plane(*axes(points, limit), WIDTH, height_of(comparison), LEFT, TOP, RIGHT, BOTTOM)
    names = labels(plane, points, limit)
    marks = [
        *_grid(plane),
        *_titles(comparison, plane, points),
        *_limit(plane, limit),
        *_front(plane, points),
        *(mark for point in points for mark in _point(plane, point)),
        *(mark for name in names for mark in _name(plane, name)),
    ]
    told = "; ".join(
        f"{named(p.names, 99)} {seconds_text(p.seconds)} {byte_text(p.peak)}{', on the front' * p.on_front}"
        for p in points
    )
    label_text = printable(f"peak memory against step time: {told}")
    return drawing(WIDTH, plane.height, label_text, marks), len(points) - len(names)


def height_of(comparison: Comparison) -> int:
    """Of the chart, in px."""
    return HEIGHT if len(data.points_of(comparison)) < CROWD else MORE_HEIGHT


def _how_to_read(comparison: Comparison, points: Sequence[data.Point], unnamed: int) -> Iterator[str]:
    """What is on the front, and what the marks are."""
    front = [name for point in points if point.on_front for name in point.names]
    if front:
        more = more_text(len(front), MOST_NAMED)
        names = ", ".join(f"<b>{unbroken(name)}</b>" for name in front[:MOST_NAMED])
        yield f"On the Pareto front, solid: {names}{more}. No trial is both faster and smaller."
    if any(not point.usable for point in points):
        yield "Crossed: does not fit, or has other numbers than the plain step."
    untimed = [t for t in comparison.trials if not data.failed(t) and comparison.seconds(t) is None]
    if untimed:
        names = words.trial_names(comparison)
        left = ", ".join(unbroken(names[t.key].text) for t in untimed[:MOST_NAMED])
        more = more_text(len(untimed), MOST_NAMED)
        yield f"Without a {comparison.source} step time, and not drawn: {left}{more}."
    if unnamed == 1:
        yield "One point has no room for its name; the table has it."
    elif unnamed:
        yield f"{count_text(unnamed)} points have no room for their names; the table has them."


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return label(x, y, content, SIZE, more)


def _grid(plane: Plane) -> Iterator[str]:
    for value, told in plane.bytes.ticks:
        y = number(plane.y(value))
        yield f'<path d="M{LEFT} {y}H{number(plane.right)}" {_INK} stroke-opacity=".18"/>'
        yield _text(LEFT - 6, plane.y(value) + 4, told, ' text-anchor="end" fill-opacity=".8"')
    for value, told in plane.seconds.ticks:
        x = plane.x(value)
        yield f'<path d="M{number(x)} {number(plane.floor)}v4" {_INK} stroke-opacity=".42"/>'
        anchor = "end" if x > plane.right - 10 else "middle"
        at = min(x, plane.right)
        yield _text(at, plane.floor + 16, told, f' text-anchor="{anchor}" fill-opacity=".8"')


def _titles(comparison: Comparison, plane: Plane, points: Sequence[data.Point]) -> Iterator[str]:
    yield _text(0, 10, f"peak memory, {plane.bytes.unit}")
    tail = "; the tail starts at the prediction" * any(point.tail is not None for point in points)
    told = f"step time, {plane.seconds.unit} ({words.source_text(comparison)}{tail})"
    yield _text(plane.right, plane.height - 4, told, ' text-anchor="end"')


def _limit(plane: Plane, limit: int | None) -> Iterator[str]:
    if limit is None:
        return
    told, end = f"limit {limit_text(limit)}", ' text-anchor="end" class="jss-limit"'
    if limit > plane.bytes.high:
        yield _text(plane.right, 10, f"{told} is above the plot \u2191", end).replace("currentColor", LIMIT)
    else:
        y = plane.y(limit)
        yield f'<path d="M{LEFT} {number(y)}H{number(plane.right)}" stroke="{LIMIT}" stroke-width="1.5"/>'
        yield _text(plane.right, y - 4, told, end).replace("currentColor", LIMIT)


def _front(plane: Plane, points: Sequence[data.Point]) -> Iterator[str]:
    """The staircase that bounds what can be had, and what lies behind it shaded."""
    corners = plane.stairs([point for point in points if point.on_front])
    if corners:
        path = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners)
        yield f'<path d="{path}V{TOP}Z" fill="currentColor" fill-opacity=".045"/>'
        yield f'<path d="{path}" {_INK} stroke-opacity=".6" stroke-dasharray="4 2"/>'


def _point(plane: Plane, point: data.Point) -> Iterator[str]:
    x, y = plane.x(point.seconds), plane.y(point.peak)
    if point.tail is not None:
        start, end = plane.x(point.tail), x - RADIUS if point.tail < point.seconds else x + RADIUS
        if abs(start - x) > RADIUS:
            yield f'<path d="M{number(start)} {number(y)}H{number(end)}" {_INK} stroke-opacity=".6"/>'
    told = f"{named(point.names, 99)}: {seconds_text(point.seconds)}, {byte_text(point.peak)}"
    title = f"<title>{escape(printable(told))}</title>"
    if not point.usable:
        cross = f"M{number(x - 4)} {number(y - 4)}l8 8m0-8l-8 8"
        yield f'<path d="{cross}" stroke="{LIMIT}" stroke-width="1.8">{title}</path>'
        return
    paint = 'fill="currentColor"' if point.on_front else 'fill="none" pointer-events="all"'
    where = f'cx="{number(x)}" cy="{number(y)}" r="{RADIUS}"'
    yield f'<circle {where} {paint} stroke="currentColor" stroke-width="1.4">{title}</circle>'


def _name(plane: Plane, name: Label) -> Iterator[str]:
    """A name, with a line to it where it stands away from its point."""
    point, box = name.point, name.box
    if name.end is not None:
        x, y = name.end
        path = f"M{number(plane.x(point.seconds))} {number(plane.y(point.peak))}L{number(x)} {number(y)}"
        yield f'<path d="{path}" {_INK} stroke-opacity=".35"/>'
    yield _text(box.x, box.y + LINE - 3, name.text, _MONO + ("" if point.on_front else ' fill-opacity=".8"'))
