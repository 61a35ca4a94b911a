"""Compared pipeline schedules as text for a terminal, and as HTML with two charts: bubble against microbatches, and
bubble against microbatches held by a rank.

Lines of the charts are distinguished by dashes, and every line and point has its name beside it: a hue stands for a
mesh axis in other views.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log2
from typing import TYPE_CHECKING, NamedTuple

from jaxshard_magic.views import words
from jaxshard_magic.views.format import UNKNOWN, rounded
from jaxshard_magic.views.html_tags import SIGNS, code, document, join_nonempty, section, small, table
from jaxshard_magic.views.html_tags import escaped as safe
from jaxshard_magic.views.svg import DASHES, Box, coordinate, drawing, join_names, label
from jaxshard_magic.views.terminal import pad, plain_signs, text_width, wrap

if TYPE_CHECKING:
    from jaxshard_magic.schedule.compare import ComparedSchedule, ScheduleComparison

_HEADS = ("schedule", "chunks", "bubble", "steady", "makespan", "held", "")
_FRONT = "on the front"
_NOTES = (
    "bubble: idle share of all ranks' time, from the first start to the last end; steady: where steps follow each "
    "other without a barrier; held: microbatches of a whole rank, on the fullest one",
    f"{_FRONT}: no other has a smaller bubble without holding more",
)
_COSTS = {
    "forward": "forward",
    "input_grad": "input gradient",
    "weight_grad": "weight gradient",
    "transfer": "transfer",
    "kept_for_weight_grad": "kept for the weight gradient",
}
WIDTH, HEIGHT = 412, 236
LEFT, RIGHT, TOP, BOTTOM = 38, 116, 10, 36
SIZE, LINE, CHARACTER = 11, 13, 6.0  # px: font size, line height, mean width of a letter
MOST_LETTERS = 19
_INK = 'stroke="currentColor" fill="none"'


def to_text(comparison: "ScheduleComparison", width: int | None = None) -> str:
    """Render the comparison as lines for a terminal: figures, then curves.

    Args:
        comparison: Compared schedules.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    columns = text_width(width)
    figures = [list(_HEADS)]
    figures += [[row.name, *_cells(row), _remark(comparison, row, "!", str)] for row in comparison.rows]
    parts = [
        wrap(summary(comparison), columns),
        wrap(setup_text(comparison), columns),
        _columns(figures, columns),
        [line for note in _NOTES for line in wrap(note, columns)],
    ]
    curves = _curves(comparison)
    if len(curves) > 1:
        parts.append(["bubble against microbatches", *_columns(curves, columns)])
    return plain_signs("\n\n".join("\n".join(part) for part in parts))


def to_html(comparison: "ScheduleComparison") -> str:
    """Render the comparison as an HTML fragment without script, for a notebook or a page."""
    head, holding, rest = summary(comparison).partition(", holding")
    side = "display:inline-block;vertical-align:top;margin:0 12px 8px 0"
    titled_charts = (
        ("Bubble against microbatches", bubble_chart(comparison.rows, comparison.microbatches)),
        ("Bubble against what the fullest rank holds", memory_chart(comparison.rows, comparison.memory_limit)),
    )
    aligned = [(name, "right") for name in _HEADS]
    sign = f'<span class="jss-warning">{SIGNS["warning"]}</span>'
    figures = [
        [code(row.name), *map(safe, _cells(row)), _remark(comparison, row, sign, safe)] for row in comparison.rows
    ]
    curves = _curves(comparison)
    parts = [
        f'<p class="jss-verdict"><b>{safe(head)}</b>{holding}{safe(rest)}</p>',
        small(safe(setup_text(comparison))),
        *(f'<div style="{side}"><small>{title}</small><br>{chart}</div>' for title, chart in titled_charts),
        table([(_HEADS[0], "left"), *aligned[1:-1], ("", "wrap")], figures),
        *(small(safe(note)) for note in _NOTES),
    ]
    if len(curves) > 1:
        top = [(name, "right" if i else "left") for i, name in enumerate(curves[0])]
        curve_table = table(top, [[code(row[0]), *map(safe, row[1:])] for row in curves[1:]])
        parts.append(section("Bubble against microbatches", curve_table))
    return f'<div class="jss">\n{join_nonempty(parts)}\n</div>\n'


def page(comparison: "ScheduleComparison") -> str:
    """Render the comparison as a whole HTML document; the theme, light or dark, is the reader's."""
    return document("compared schedules", to_html(comparison))


def summary(comparison: "ScheduleComparison") -> str:
    """Name the schedules with the smallest bubble, and the schedules that hold least if they are others."""
    bubble = min(row.bubble for row in comparison.rows if row.bubble is not None)
    best = [row for row in _known(comparison) if _is_close(row.bubble, bubble)]
    held = min(row.peak_microbatches or 0 for row in best)
    best = [row for row in best if _is_close(row.peak_microbatches, held)]
    least = min(row.peak_microbatches or 0 for row in _known(comparison))
    sentence = (
        f"Smallest bubble: {_names(best)}, {words.percent_text(bubble)}, holding {_microbatches_text(held)} "
        "microbatches"
    )
    if _is_close(held, least):
        return f"{sentence}, and none holds less."
    frugal = [row for row in _known(comparison) if _is_close(row.peak_microbatches, least)]
    smallest = min(row.bubble or 0 for row in frugal)
    frugal = [row for row in frugal if _is_close(row.bubble, smallest)]
    return (
        f"{sentence}. Least held: {_names(frugal)}, {_microbatches_text(least)}, with a bubble of "
        f"{words.percent_text(smallest)}."
    )


def setup_text(comparison: "ScheduleComparison") -> str:
    """Return the setting: `4 stages × 16 microbatches. Costs of a microbatch on one of the model's 4 parts: forward 1,
    ...`."""
    parts = []
    for field, name in _COSTS.items():
        cost = getattr(comparison.costs, field)
        if field != "kept_for_weight_grad" or cost != 1:
            parts.append(f"{name} {_several(cost)}")
    most = comparison.memory_limit
    limit = "" if most is None else f"; memory limit {most:g} microbatches"
    return (
        f"{comparison.stages} stages × {comparison.microbatches} microbatches{limit}. Costs of a microbatch on one of "
        f"the model's {comparison.stages} parts: {', '.join(parts)}; a part's chunks share them."
    )


def _several(given: float | Sequence[float]) -> str:
    if isinstance(given, float | int):
        return f"{given:g}"
    if len(given) > 8:
        return f"{min(given):g} to {max(given):g}"
    return " ".join(f"{each:g}" for each in given)


def _known(comparison: "ScheduleComparison") -> list["ComparedSchedule"]:
    """Return the rows with figures: schedules that were not refused."""
    return [row for row in comparison.rows if row.why is None]


def _is_close(one: float | None, other: float) -> bool:
    # Bubbles are computed in floating point: equal ones may differ by rounding.
    return one is not None and abs(one - other) < 1e-9


def _names(rows: Sequence["ComparedSchedule"]) -> str:
    return " and ".join(row.name for row in rows)


def _microbatches_text(value: float) -> str:
    return rounded(value, 1).removesuffix(".0")


def _cells(row: "ComparedSchedule") -> list[str]:
    shares = (row.bubble, row.steady_bubble)
    return [
        str(row.chunks),
        *map(words.percent_text, shares),
        UNKNOWN if row.makespan is None else f"{row.makespan:.5g}",
        UNKNOWN if row.peak_microbatches is None else rounded(row.peak_microbatches, 1),
    ]


def _remark(comparison: "ScheduleComparison", row: "ComparedSchedule", sign: str, marked: Callable[[str], str]) -> str:
    """Return the last column: the reason for a refusal, a memory limit that is exceeded, or membership in the front."""
    if row.why is not None:
        return marked(row.why.removeprefix(f"{row.name}: "))
    most = comparison.memory_limit
    over = most is not None and (row.peak_microbatches or 0) > most + 1e-9
    return ", ".join([f"{sign} above the limit"] * over + [_FRONT] * row.on_front)


def _curves(comparison: "ScheduleComparison") -> list[list[str]]:
    """Return a line of microbatch numbers, then a line of bubbles for each schedule with a curve."""
    numbers = sorted({at for row in comparison.rows for at, _ in row.curve})
    lines = []
    for row in comparison.rows:
        if row.curve:
            known = dict(row.curve)
            lines.append([row.name, *(words.percent_text(known.get(at)) for at in numbers)])
    return [["schedule", *map(str, numbers)], *lines]


def _columns(lines: Sequence[Sequence[str]], width: int) -> list[str]:
    """Align columns: the first to the left, figures to the right. Long remarks in the last column are wrapped below."""
    remarks = lines[0][-1] == ""
    figures = len(lines[0]) - remarks
    widths = [max(len(line[i]) for line in lines) for i in range(figures)]
    aligned = []
    for line in lines:
        cells = [pad(line[i], widths[i], "right" if i else "left") for i in range(figures)]
        start = "  ".join(cells)
        more = line[-1] if remarks else ""
        aligned += wrap(more, width, f"{start}  ", " " * (len(start) + 2)) if more else [start]
    return [line.rstrip() for line in aligned]


class SchedulePoint(NamedTuple):
    """Schedules with equal memory and bubble.

    Attributes:
        peak_microbatches: Largest number of microbatches held by a rank.
        bubble: Idle share of all ranks' time.
        steady: Bubble of steps that follow each other without a barrier.
        names: Names of the schedules.
        on_front: True if no other schedule has a smaller bubble without holding more.
    """

    peak_microbatches: float
    bubble: float
    steady: float
    names: tuple[str, ...]
    on_front: bool


@dataclass(frozen=True)
class _Plane:
    """Scale of a chart: x from `low` to `high`, y from 0 to `top`."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        """Return the x coordinate of a value in px."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value in px."""
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - BOTTOM - TOP)


def bubble_chart(rows: Sequence["ComparedSchedule"], microbatches: int) -> str:
    """Draw the bubble of each schedule against the number of microbatches, on a logarithmic scale.

    Args:
        rows: Compared schedules.
        microbatches: Requested number, marked by a dot.
    """
    curves = _curve_groups(rows)
    if not curves:
        return ""
    numbers = sorted({at for curve in curves for at, _ in curve})
    step, top = _scale(max(bubble for curve in curves for _, bubble in curve))
    plane = _Plane(log2(numbers[0]), log2(numbers[-1]), top)
    marks = [*_bubble_axis(plane, step), *_ticks([(plane.x(log2(at)), str(at)) for at in numbers], "microbatches")]
    ends = []
    for place, (curve, group) in enumerate(curves.items()):
        on_front = any(row.on_front for row in group)
        path = [(plane.x(log2(at)), plane.y(bubble)) for at, bubble in curve]
        marks.append(_line(path, on_front, place))
        marks += [_dot(*path[i], on_front) for i, (at, _) in enumerate(curve) if at == microbatches]
        ends.append((path[-1], join_names((row.name for row in group), MOST_LETTERS), on_front))
    marks += _curve_names(ends)
    names = ", ".join(row.name for group in curves.values() for row in group)
    return drawing(WIDTH, HEIGHT, f"bubble against microbatches: {names}", marks)


def memory_chart(rows: Sequence["ComparedSchedule"], limit: float | None) -> str:
    """Draw the bubble of each schedule against the microbatches held by its fullest rank, on a logarithmic scale.

    A staircase joins the schedules on the front. A tail reaches down to the bubble of steps that follow each other
    without a barrier, if smaller.

    Args:
        rows: Compared schedules.
        limit: Memory limit in microbatches, drawn as a dashed line; None for none.
    """
    points = _points(rows)
    if not points:
        return ""
    held_counts = [point.peak_microbatches for point in points] + ([limit] if limit else [])
    step, top = _scale(max(point.bubble for point in points))
    least, most = floor(log2(min(held_counts))), ceil(log2(max(held_counts)))
    plane = _Plane(least, max(most, least + 1), top)
    ticks = [(plane.x(power), f"{2.0**power:g}") for power in range(least, most + 1)]
    marks = [*_bubble_axis(plane, step), *_ticks(ticks, "microbatches held")]
    if limit is not None:
        x = coordinate(plane.x(log2(limit)))
        marks.append(f'<path d="M{x} {TOP}V{HEIGHT - BOTTOM}" {_INK} stroke-dasharray="2 3"/>')
    marks.append(_staircase(plane, [point for point in points if point.on_front]))
    for point in points:
        x, y = plane.x(log2(point.peak_microbatches)), plane.y(point.bubble)
        if point.bubble - point.steady > 0.0005:
            low = coordinate(plane.y(point.steady))
            marks.append(f'<path d="M{coordinate(x)} {coordinate(y)}V{low}m-4 0h8" {_INK} stroke-opacity=".6"/>')
        marks.append(_dot(x, y, point.on_front))
    marks += _labels(plane, points)
    points_text = "; ".join(
        f"{join_names(p.names, 99)} {words.percent_text(p.bubble)} at {p.peak_microbatches:g}" for p in points
    )
    return drawing(WIDTH, HEIGHT, f"bubble against microbatches held: {points_text}", marks)


def _curve_groups(rows: Sequence["ComparedSchedule"]) -> dict[tuple[tuple[int, float], ...], list["ComparedSchedule"]]:
    """Group rows by their curves, so that equal curves are drawn once."""
    curves: dict[tuple[tuple[int, float], ...], list[ComparedSchedule]] = {}
    for row in rows:
        if row.curve:
            # Rounded, or rounding errors would separate equal curves.
            curves.setdefault(tuple((at, round(bubble, 6)) for at, bubble in row.curve), []).append(row)
    return curves


def _points(rows: Sequence["ComparedSchedule"]) -> list[SchedulePoint]:
    points: dict[tuple[float, float], list[ComparedSchedule]] = {}
    for row in rows:
        if row.bubble is not None and row.peak_microbatches is not None:
            points.setdefault((round(row.peak_microbatches, 6), round(row.bubble, 6)), []).append(row)
    return [
        SchedulePoint(
            held,
            bubble,
            min(row.steady_bubble or 0.0 for row in group),
            tuple(row.name for row in group),
            any(row.on_front for row in group),
        )
        for (held, bubble), group in sorted(points.items())
    ]


def _round_step(most: float) -> tuple[float, float]:
    """Return a round step for an axis of at most six steps, and the first multiple of the step not below `most`."""
    if most <= 0:
        return 1.0, 1.0
    power = 10.0 ** (len(str(int(most))) - 2)
    step = next(each * power for each in (0.5, 1, 2, 2.5, 5, 10, 20) if each * power * 6 >= most)
    # The tolerance keeps a multiple of the step from being rounded up to the next.
    return step, step * ceil(most / step - 1e-9)


def _scale(most: float) -> tuple[float, float]:
    """Return step and top of an axis of bubbles."""
    step, top = _round_step(100 * most)
    return step / 100, top / 100


def _bubble_axis(plane: _Plane, step: float) -> Iterable[str]:
    for i in range(round(plane.top / step) + 1):
        y = plane.y(i * step)
        yield f'<path d="M{LEFT} {coordinate(y)}H{WIDTH - RIGHT}" {_INK} stroke-opacity=".18"/>'
        yield label(LEFT - 6, y + 4, f"{100 * i * step:g}%", SIZE, ' text-anchor="end" fill-opacity=".8"')


def _ticks(labels: Sequence[tuple[float, str]], name: str) -> Iterable[str]:
    right, middle = -1000.0, ' text-anchor="middle" fill-opacity=".8"'
    for x, tick in labels:
        width = CHARACTER * len(tick)
        if x - width / 2 > right:
            yield label(x, HEIGHT - BOTTOM + 15, tick, SIZE, middle)
            right = x + width / 2 + 4
    yield label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, name, SIZE, middle)


def _line(path: Sequence[tuple[float, float]], on_front: bool, place: int) -> str:
    d = "M" + "L".join(f"{coordinate(x)} {coordinate(y)}" for x, y in path)
    dash = "" if on_front else f' stroke-dasharray="{DASHES[1 + place % 3]}" stroke-opacity=".7"'
    return f'<path d="{d}" {_INK} stroke-width="{2 if on_front else 1.25}"{dash}/>'


def _dot(x: float, y: float, on_front: bool) -> str:
    size, opacity = (4, "") if on_front else (3, ' fill-opacity=".7"')
    return f'<circle cx="{coordinate(x)}" cy="{coordinate(y)}" r="{size}" fill="currentColor"{opacity}/>'


def _staircase(plane: _Plane, front: Sequence[SchedulePoint]) -> str:
    """Return a line along the front: from the schedule that holds least, down at each smaller bubble."""
    if not front:
        return ""
    d = f"M{coordinate(plane.x(log2(front[0].peak_microbatches)))} {TOP}V{coordinate(plane.y(front[0].bubble))}"
    for point in front[1:]:
        d += f"H{coordinate(plane.x(log2(point.peak_microbatches)))}V{coordinate(plane.y(point.bubble))}"
    return f'<path d="{d}H{WIDTH - RIGHT}" {_INK} stroke-opacity=".55"/>'


def _bold(on_front: bool) -> str:
    return ' font-weight="600"' if on_front else ' fill-opacity=".8"'


def _curve_names(ends: Sequence[tuple[tuple[float, float], str, bool]]) -> Iterable[str]:
    """Yield curve names at the right, moved apart if their curves end close to each other."""
    ordered = sorted(ends, key=lambda end: end[0][1])
    label_ys: list[float] = []
    for (_, y), _, _ in ordered:
        label_ys.append(max(y, label_ys[-1] + LINE) if label_ys else max(y, TOP + 4))
    over = label_ys[-1] - (HEIGHT - BOTTOM)
    for i in range(len(label_ys) - 1, -1, -1):  # labels pushed below the chart move those above them up
        ceiling = label_ys[i + 1] - LINE if i + 1 < len(label_ys) else label_ys[i] - max(0.0, over)
        label_ys[i] = min(label_ys[i], ceiling)
    edge = WIDTH - RIGHT
    for ((x, y), name, on_front), place in zip(ordered, label_ys, strict=True):
        if x < edge - 1 or abs(place - y) > 2:
            yield (
                f'<path d="M{coordinate(x + 5)} {coordinate(y)}L{edge + 8} {coordinate(place)}" {_INK} '
                'stroke-opacity=".3"/>'
            )
        yield label(edge + 10, place + 4, name, SIZE, _bold(on_front))


def _labels(plane: _Plane, points: Sequence[SchedulePoint]) -> Iterable[str]:
    """Yield the name of each point, at the first position that covers neither a name nor a point."""
    dots = [Box(plane.x(log2(p.peak_microbatches)) - 4, plane.y(p.bubble) - 4, 8, 8) for p in points]
    occupied: list[Box] = []
    # Points on the front choose their positions first.
    for point in sorted(points, key=lambda p: not p.on_front):
        name = join_names(point.names, MOST_LETTERS)
        x, y, width = plane.x(log2(point.peak_microbatches)), plane.y(point.bubble), CHARACTER * len(name)
        right, left = x + 6, x - 6 - width
        candidates = [
            Box(right, y - LINE - 1, width, LINE),
            Box(right, y + 2, width, LINE),
            Box(left, y - LINE - 1, width, LINE),
            Box(left, y + 2, width, LINE),
            *(Box(x + 14, y + LINE * i, width, LINE) for i in (-2.5, 1.5, -3.5, 2.5, -4.5, 3.5)),
        ]
        inside_chart = [
            b for b in candidates if b.x >= LEFT and b.x + width <= WIDTH and 0 <= b.y <= HEIGHT - BOTTOM - LINE
        ]
        # Without a free position a name may overlap: no name is left out.
        box = next((b for b in inside_chart if not any(map(b.overlaps, [*occupied, *dots]))), candidates[0])
        if box not in candidates[:4]:
            line = f"M{coordinate(x)} {coordinate(y)}L{coordinate(box.x - 2)} {coordinate(box.y + LINE / 2)}"
            yield f'<path d="{line}" {_INK} stroke-opacity=".4"/>'
        occupied.append(box)
        yield label(box.x, box.y + LINE - 3, name, SIZE, _bold(point.on_front))
