"""Compared pipeline schedules as text for a terminal, and as HTML with two charts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jaxshard_magic.views import schedule_charts as charts
from jaxshard_magic.views import words
from jaxshard_magic.views.format import UNKNOWN, rounded
from jaxshard_magic.views.html_document import document
from jaxshard_magic.views.html_tags import SIGNS, code, join_nonempty, section, small, table
from jaxshard_magic.views.html_tags import escaped as safe
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
        ("Bubble against microbatches", charts.bubble_chart(comparison.rows, comparison.microbatches)),
        ("Bubble against what the fullest rank holds", charts.memory_chart(comparison.rows, comparison.memory_limit)),
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
