"""Chart of a comparison: peak memory against step time, with the Pareto front.

Trials on the front are solid. A tail begins at the predicted step time. A name is drawn only if it covers no other name
and no mark; the table has all names.
"""

from collections.abc import Iterator, Sequence
from html import escape

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views import words
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison.plane import LINE, PlotArea, PointLabel, axes_for, place_labels
from jaxshard_magic.views.format import byte_text, count_text, limit_text, more_text, printable, seconds_text
from jaxshard_magic.views.html_tags import unbroken
from jaxshard_magic.views.svg import LIMIT, coordinate, drawing, join_names, label

WIDTH, HEIGHT, MORE_HEIGHT = 584, 248, 340
CROWD = 12  # points from which on the chart is higher
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 22, 36
SIZE, RADIUS = 11, 4.5  # px: font size, radius of points
MOST_NAMED = 6  # names in a sentence, at most
_INK = 'stroke="currentColor" fill="none"'
_MONO = ' font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace"'


def chart_with_notes(comparison: Comparison) -> str:
    """Return the chart with notes on how to read it; empty for fewer than two points."""
    chart, unnamed = chart_svg(comparison)
    if not chart:
        return ""
    read = "<br>".join(_how_to_read(comparison, data.trial_points(comparison), unnamed))
    return (
        '<div style="display:flex;flex-wrap:wrap;gap:4px 20px;margin:12px 0">'
        f'<div>{chart}</div><div style="flex:1 1 230px"><small>{read}</small></div></div>'
    )


def chart_svg(comparison: Comparison) -> tuple[str, int]:
    """Return the chart alone as one `<svg>`, and the number of points without a name; ("", 0) for fewer than two
    points."""
    points = data.trial_points(comparison)
    if len(points) < 2:
        return "", 0
    limit = data.limit_of(comparison)
    plane = PlotArea(*axes_for(points, limit), WIDTH, height_of(comparison), LEFT, TOP, RIGHT, BOTTOM)
    names = place_labels(plane, points, limit)
    marks = [
        *_grid(plane),
        *_titles(comparison, plane, points),
        *_limit(plane, limit),
        *_front(plane, points),
        *(mark for point in points for mark in _point(plane, point)),
        *(mark for name in names for mark in _name(plane, name)),
    ]
    points_text = "; ".join(
        f"{join_names(p.names, 99)} {seconds_text(p.seconds)} {byte_text(p.peak)}{', on the front' * p.on_front}"
        for p in points
    )
    label_text = printable(f"peak memory against step time: {points_text}")
    return drawing(WIDTH, plane.height, label_text, marks), len(points) - len(names)


def height_of(comparison: Comparison) -> int:
    """Return the height of the chart in px; crowded charts are higher."""
    return HEIGHT if len(data.trial_points(comparison)) < CROWD else MORE_HEIGHT


def _how_to_read(comparison: Comparison, points: Sequence[data.TrialPoint], unnamed: int) -> Iterator[str]:
    """Yield sentences on the front, on crossed points, on trials without a step time, and on points without a name."""
    front = [name for point in points if point.on_front for name in point.names]
    if front:
        more = more_text(len(front), MOST_NAMED)
        names = ", ".join(f"<b>{unbroken(name)}</b>" for name in front[:MOST_NAMED])
        yield f"On the Pareto front, solid: {names}{more}. No trial is both faster and smaller."
    if any(not point.usable for point in points):
        yield "Crossed: does not fit, or has other numbers than the plain step."
    untimed = [t for t in comparison.trials if not data.has_failed(t) and comparison.seconds(t) is None]
    if untimed:
        names = words.trial_names(comparison)
        untimed_names = ", ".join(unbroken(names[t.key].text) for t in untimed[:MOST_NAMED])
        more = more_text(len(untimed), MOST_NAMED)
        yield f"Without a {comparison.source} step time, and not drawn: {untimed_names}{more}."
    if unnamed == 1:
        yield "One point has no room for its name; the table has it."
    elif unnamed:
        yield f"{count_text(unnamed)} points have no room for their names; the table has them."


def _text(x: float, y: float, content: str, more: str = "") -> str:
    return label(x, y, content, SIZE, more)


def _grid(plane: PlotArea) -> Iterator[str]:
    for value, told in plane.bytes.ticks:
        y = coordinate(plane.y(value))
        yield f'<path d="M{LEFT} {y}H{coordinate(plane.right)}" {_INK} stroke-opacity=".18"/>'
        yield _text(LEFT - 6, plane.y(value) + 4, told, ' text-anchor="end" fill-opacity=".8"')
    for value, told in plane.seconds.ticks:
        x = plane.x(value)
        yield f'<path d="M{coordinate(x)} {coordinate(plane.floor)}v4" {_INK} stroke-opacity=".42"/>'
        anchor = "end" if x > plane.right - 10 else "middle"
        at = min(x, plane.right)
        yield _text(at, plane.floor + 16, told, f' text-anchor="{anchor}" fill-opacity=".8"')


def _titles(comparison: Comparison, plane: PlotArea, points: Sequence[data.TrialPoint]) -> Iterator[str]:
    yield _text(0, 10, f"peak memory, {plane.bytes.unit}")
    tail = "; the tail starts at the prediction" * any(point.predicted is not None for point in points)
    told = f"step time, {plane.seconds.unit} ({words.source_text(comparison)}{tail})"
    yield _text(plane.right, plane.height - 4, told, ' text-anchor="end"')


def _limit(plane: PlotArea, limit: int | None) -> Iterator[str]:
    if limit is None:
        return
    limit_label, end = f"limit {limit_text(limit)}", ' text-anchor="end" class="jss-limit"'
    # `label` has no argument for the colour: it paints in `currentColor`, replaced afterwards.
    if limit > plane.bytes.high:
        yield _text(plane.right, 10, f"{limit_label} is above the plot \u2191", end).replace("currentColor", LIMIT)
    else:
        y = plane.y(limit)
        yield f'<path d="M{LEFT} {coordinate(y)}H{coordinate(plane.right)}" stroke="{LIMIT}" stroke-width="1.5"/>'
        yield _text(plane.right, y - 4, limit_label, end).replace("currentColor", LIMIT)


def _front(plane: PlotArea, points: Sequence[data.TrialPoint]) -> Iterator[str]:
    """Yield the staircase of the Pareto front, and shade the dominated area behind it."""
    corners = plane.stairs([point for point in points if point.on_front])
    if corners:
        path = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in corners)
        yield f'<path d="{path}V{TOP}Z" fill="currentColor" fill-opacity=".045"/>'
        yield f'<path d="{path}" {_INK} stroke-opacity=".6" stroke-dasharray="4 2"/>'


def _point(plane: PlotArea, point: data.TrialPoint) -> Iterator[str]:
    """Yield the mark of a point, and the tail that joins the predicted step time with the measured one."""
    x, y = plane.x(point.seconds), plane.y(point.peak)
    if point.predicted is not None:
        start, end = plane.x(point.predicted), x - RADIUS if point.predicted < point.seconds else x + RADIUS
        if abs(start - x) > RADIUS:
            yield f'<path d="M{coordinate(start)} {coordinate(y)}H{coordinate(end)}" {_INK} stroke-opacity=".6"/>'
    tooltip = f"{join_names(point.names, 99)}: {seconds_text(point.seconds)}, {byte_text(point.peak)}"
    title = f"<title>{escape(printable(tooltip))}</title>"
    if not point.usable:
        cross = f"M{coordinate(x - 4)} {coordinate(y - 4)}l8 8m0-8l-8 8"
        yield f'<path d="{cross}" stroke="{LIMIT}" stroke-width="1.8">{title}</path>'
        return
    # A circle without fill gets no pointer events inside by default, and would show no tooltip there.
    paint = 'fill="currentColor"' if point.on_front else 'fill="none" pointer-events="all"'
    where = f'cx="{coordinate(x)}" cy="{coordinate(y)}" r="{RADIUS}"'
    yield f'<circle {where} {paint} stroke="currentColor" stroke-width="1.4">{title}</circle>'


def _name(plane: PlotArea, name: PointLabel) -> Iterator[str]:
    """Yield a name, and a line to its point if the name is not adjacent to it."""
    point, box = name.point, name.box
    if name.leader_end is not None:
        x, y = name.leader_end
        path = (
            f"M{coordinate(plane.x(point.seconds))} {coordinate(plane.y(point.peak))}L{coordinate(x)} {coordinate(y)}"
        )
        yield f'<path d="{path}" {_INK} stroke-opacity=".35"/>'
    yield _text(box.x, box.y + LINE - 3, name.text, _MONO + ("" if point.on_front else ' fill-opacity=".8"'))
