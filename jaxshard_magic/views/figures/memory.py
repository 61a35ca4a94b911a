"""Memory of each device by role, against the limit, with a tick at each measured peak."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import DeviceMemory, Memory, Report
from jaxshard_magic.views import device_memory, words
from jaxshard_magic.views.figures.figure_layout import CLEAR, category_axis, figure_layout, value_axis
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, device_text, limit_text

BAR = 24  # px
EVERY_DEVICE = 16  # devices up to which each has a bar of its own
MOST_BARS = 40
TICKS = 6
TICK = 14  # plotly's marker size for 20 px, beside bars of 17 px
SEEN = 0.003  # share of the width below which a segment has no outline


@dataclass(frozen=True)
class MemoryBar:
    """Bar of one device, or of several with equal memory.

    Attributes:
        label: Devices.
        device: Memory shown by the bar.
        measured: Device with the largest measured peak among those of the bar; None without a measurement.
    """

    label: str
    device: DeviceMemory
    measured: DeviceMemory | None

    @property
    def end(self) -> int:
        return max(device_memory.length(self.device), (self.measured and self.measured.measured) or 0)


def memory(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """Return the figure. Above 16 devices, devices with equal memory share a bar.

    Raises:
        ShardError: The report has no memory.
    """
    if report.memory is None or not report.memory.per_device:
        raise ShardError("this report knows nothing of memory, so it has no memory figure")
    bars, left = _bars(report.memory)
    full, limit = device_memory.scale(report.memory)
    roles = device_memory.roles(report.memory)
    chart = go.Figure([_role_bars(role, report.memory, bars, colours, SEEN * full) for role in roles])
    if any(bar.measured for bar in bars):
        chart.add_trace(_ticks(bars, colours))
    chart.update_layout(_frame(report.memory, len(bars), left, colours))
    chart.update_xaxes(_bytes_axis(full * 1.08, colours))
    chart.update_yaxes(category_axis([bar.label for bar in bars]))
    for i, bar in enumerate(bars):
        at = {"x": bar.end, "y": i, "xanchor": "left", "xshift": 4, "showarrow": False}
        chart.add_annotation(text=byte_text(device_memory.bytes_at_peak(bar.device)), **at)
    if limit is not None:
        _draw_limit(chart, limit, colours)
    return chart


def _bars(memory: Memory) -> tuple[list[MemoryBar], int]:
    """Return the bars, and the number of devices without a bar."""
    groups = device_memory.groups(memory)
    if len(memory.per_device) <= EVERY_DEVICE:
        groups = tuple(device_memory.DeviceGroup((d.device,), d) for d in memory.per_device)
    bars = [
        MemoryBar(device_text(group.devices), group.fullest, device_memory.highest_measured(memory, group.devices))
        for group in groups[:MOST_BARS]
    ]
    return bars, sum(len(group.devices) for group in groups[MOST_BARS:])


def _role_bars(
    role: str, memory: Memory, bars: Sequence[MemoryBar], colours: Mapping[str, str], least: float
) -> go.Bar:
    """Return the segments of one role in all bars."""
    sizes = [getattr(bar.device, role) for bar in bars]
    marker: dict[str, Any] = {"color": colours[role], "line": {"width": 0}}
    if role == "other":
        outline = {"width": [int((size or 0) > least) for size in sizes], "color": colours["other"]}
        hatch = {"shape": "/", "size": 5, "fgcolor": colours["other"], "bgcolor": CLEAR}
        marker = {"color": CLEAR, "pattern": hatch, "line": outline}
    return go.Bar(
        name=f"{role} {byte_text(getattr(device_memory.groups(memory)[0].fullest, role))}",
        orientation="h",
        x=sizes,
        y=list(range(len(bars))),
        customdata=[[bar.label, byte_text(size)] for bar, size in zip(bars, sizes, strict=True)],
        hovertemplate=f"%{{customdata[0]}}<br>{role} <b>%{{customdata[1]}}</b><extra></extra>",
        marker=marker,
    )


def _ticks(bars: Sequence[MemoryBar], colours: Mapping[str, str]) -> go.Scatter:
    """Return the ticks at measured peaks, with the error of the computed peak as hover text."""
    measured = [(i, bar.label, bar.measured) for i, bar in enumerate(bars) if bar.measured is not None]
    return go.Scatter(
        name="measured peak",
        mode="markers",
        x=[d.measured for _, _, d in measured],
        y=[i for i, _, _ in measured],
        customdata=[
            [label, byte_text(d.peak), byte_text(d.measured), words.error_text(d) or UNKNOWN]
            for _, label, d in measured
        ],
        hovertemplate="%{customdata[0]}<br>computed <b>%{customdata[1]}</b>"
        "<br>measured <b>%{customdata[2]}</b>, %{customdata[3]}<extra></extra>",
        marker={"symbol": "line-ns", "size": TICK, "line": {"width": 2.5, "color": colours["ink"]}},
    )


def _draw_limit(chart: go.Figure, limit: int, colours: Mapping[str, str]) -> None:
    chart.add_vline(
        limit,
        line={"color": colours["error"], "width": 2},
        annotation={
            "text": f"limit {limit_text(limit)}",
            "font": {"color": colours["error"]},
            "yref": "paper",
            "y": 1,
            "yanchor": "bottom",
            "xanchor": "right",
            "xshift": 4,
        },
    )


def _frame(memory: Memory, bars: int, left: int, colours: Mapping[str, str]) -> dict[str, Any]:
    """Return the layout with title and legend."""
    head, *rest = (span.text for span in words.memory_lead(memory))
    more = f" {count_text(left)} more devices hold less." if left else ""
    note = words.scale_note(memory)
    more += f" {note}" if note else ""
    groups = device_memory.groups(memory)
    alike = len(groups) == 1 and len(groups[0].devices) > 1
    on = "each device" if alike else device_text([groups[0].fullest.device])
    return figure_layout(head, "".join(rest) + more, f"{on}:", BAR * bars, colours)


def _bytes_axis(end: float, colours: Mapping[str, str]) -> dict[str, Any]:
    """Return an axis with ticks at multiples of a power of two: 0, 4 GiB, 8 GiB."""
    step = 1
    while end / step > TICKS:
        step *= 2
    ticks = list(range(0, int(end) + 1, step))
    return value_axis(end, ticks, ["0" if tick == 0 else limit_text(tick) for tick in ticks], colours)
