"""Predicted step by bottleneck: compute, memory and communication, beside the measured step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Report, Timing
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.colours import HUES
from jaxshard_magic.views.figures.figure_layout import CLEAR, category_axis, figure_layout, value_axis
from jaxshard_magic.views.format import count_text, range_text, seconds_text, share_text
from jaxshard_magic.views.html_tags import escaped

BAR = 28  # px
TICKS = 6
OTHER_KIND = 0.4  # opacity of other kinds of collectives


@dataclass(frozen=True)
class RooflinePart:
    """Piece of a bar.

    Attributes:
        seconds: Length.
        colour: CSS colour.
        opacity: Opacity; 0 draws the outline alone.
        hover: Hover text, HTML.
    """

    seconds: float
    colour: str
    opacity: float
    hover: str


@dataclass(frozen=True)
class RooflineRow:
    """Bar of the figure.

    Attributes:
        label: Text before the bar.
        parts: Pieces, from left to right.
        told: Text after the bar.
    """

    label: str
    parts: tuple[RooflinePart, ...]
    told: str

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)


def roofline(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """Return the figure: compute and memory of the roofline, communication over each set of axes, and the whole step.

    Raises:
        ShardError: The report has no predicted step time, or no time is known for the chip.
    """
    timing = report.timing
    if timing is None or timing.on is None:
        raise ShardError(
            "this report predicts no step time, so it has no roofline figure: add --on v5e, or another chip",
            fix="--on v5e",
        )
    rows = [*_own(timing, colours), *_communication(report, colours), *_steps(report, timing, colours)]
    if not rows:
        raise ShardError(f"no time of this step is known on {timing.on}, so it has no roofline figure")
    chart = go.Figure([_bar(i, row.label, part) for i, row in enumerate(rows) for part in row.parts])
    chart.update_layout(figure_layout(*_title(report, timing), None, BAR * len(rows), colours))
    end = 1.2 * max(row.seconds for row in rows)
    chart.update_xaxes(_seconds_axis(end, colours))
    chart.update_yaxes(category_axis([row.label for row in rows]))
    for i, row in enumerate(rows):
        at = {"x": row.seconds, "y": i, "xanchor": "left", "xshift": 4, "showarrow": False}
        chart.add_annotation(text=row.told, **at)
    return chart


def _title(report: Report, timing: Timing) -> tuple[str, str]:
    chip = escaped(timing.on or "")
    bound = f"Bound by {timing.bound} on {chip}" if timing.bound else f"Predicted for {chip}"
    step = f" predicted {words.predicted_text(report)} a step." if timing.predicted_step_s else ""
    return f"{bound}:", f"{step} Compute is at the peak; communication is what nothing hides."


def _own(timing: Timing, colours: Mapping[str, str]) -> Iterator[RooflineRow]:
    """Yield the rows of compute and memory of one device."""
    sides = (
        ("compute", timing.compute_s, "temporaries", "FLOPs at the chip's peak"),
        ("memory", timing.memory_s, "other", "bytes of products and of the update at the memory's bandwidth"),
    )
    for label, seconds, colour, hover in sides:
        if seconds is not None and isfinite(seconds):
            told = seconds_text(seconds)
            yield RooflineRow(label, (RooflinePart(seconds, colours[colour], 1, f"{hover}<br><b>{told}</b>"),), told)


def _communication(report: Report, colours: Mapping[str, str]) -> list[RooflineRow]:
    """Return a row for each set of axes, the longest first, with a piece for each kind of collective."""
    parts: dict[tuple[str, ...] | None, list[tuple[str, float]]] = defaultdict(list)
    for kind, axes, seconds in words.time_parts(report):
        if kind not in words.DEVICE_PARTS:
            parts[axes].append((kind, seconds))
    step = sum(seconds for _, _, seconds in words.time_parts(report))
    rows = []
    for axes, kinds in parts.items():
        over = f"over {escaped(words.axes_text(axes))}"
        hue = colours[f"a{svg.axis_index(axes[0], report.mesh) % HUES}"] if axes else colours["other"]
        alike = [c for c in report.collectives or () if c.axes == axes]
        told = words.mark_lower_bound(seconds_text(sum(s for _, s in kinds)), alike)
        pieces = tuple(
            RooflinePart(
                s, hue, svg.KIND_OPACITY.get(kind, OTHER_KIND), f"{escaped(kind)} {over}<br><b>{seconds_text(s)}</b>"
            )
            for kind, s in kinds
        )
        rows.append(RooflineRow(over, pieces, f"{told}, {share_text(sum(s for _, s in kinds) / step)}"))
    return sorted(rows, key=lambda row: -row.seconds)


def _steps(report: Report, timing: Timing, colours: Mapping[str, str]) -> Iterator[RooflineRow]:
    """Yield the whole step: predicted, drawn hollow, and measured, drawn solid.

    Times of simulated devices are left out, being those of a CPU.
    """
    predicted = timing.predicted_step_s
    if predicted is not None and isfinite(predicted):
        between = words.predicted_range(report)
        told = words.predicted_text(report) + (f", {between}" if between else "")
        hover = f"predicted for {escaped(timing.on or '')}<br><b>{told}</b> a step"
        yield RooflineRow("step, predicted", (RooflinePart(predicted, colours["ink"], 0, hover),), told)
    spread = words.chip_step_time(report)
    if spread is not None and isfinite(spread.median):
        told = seconds_text(spread.median)
        calls = f"median of {count_text(timing.timed)}, {range_text(spread.min, spread.max)}"
        hover = f"measured on {escaped(report.mesh.device_kind)}<br><b>{told}</b>, {calls}"
        yield RooflineRow("step, measured", (RooflinePart(spread.median, colours["ink"], 1, hover),), told)


def _bar(i: int, label: str, part: RooflinePart) -> go.Bar:
    edge = {"color": part.colour, "width": 1.5} if part.opacity == 0 else {"width": 0}
    return go.Bar(
        name=label,
        orientation="h",
        x=[part.seconds],
        y=[i],
        hovertemplate=f"{part.hover}<extra></extra>",
        marker={"color": part.colour if part.opacity else CLEAR, "line": edge},
        # An opacity of 0 would hide the outline as well.
        opacity=part.opacity or 1,
    )


def _seconds_axis(end: float, colours: Mapping[str, str]) -> dict[str, object]:
    """Return an axis with ticks at round times: 0, 10 ms, 20 ms."""
    size = 10.0 ** floor(log10(end / TICKS)) if end > 0 else 1.0
    step = next(k * size for k in (1, 2, 5, 10) if end / (k * size) <= TICKS)
    ticks: Sequence[float] = [k * step for k in range(int(end / step) + 1)]
    return value_axis(end, ticks, ["0", *(seconds_text(t) for t in ticks[1:])], colours)
