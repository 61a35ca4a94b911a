"""What each device holds by role, against its limit, with a tick where its peak was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import DeviceMemory, Memory, Report
from jaxshard_magic.views import device_memory, words
from jaxshard_magic.views.figures.look import CLEAR, frame, labels, scale
from jaxshard_magic.views.format import UNKNOWN, byte_text, count_text, device_text, limit_text

BAR = 24  # px
EVERY_DEVICE = 16  # more than these share a bar where they are alike
MOST_BARS = 40
TICKS = 6
TICK = 14  # a marker's size that is 20 px high, where a bar is 17
SEEN = 0.003  # of the width: what is smaller gets no outline


@dataclass(frozen=True)
class Bar:
    """`device` is the one that the bar shows, `measured` the one behind it whose measured peak is the largest."""

    label: str
    device: DeviceMemory
    measured: DeviceMemory | None

    @property
    def end(self) -> int:
        return max(device_memory.length(self.device), (self.measured and self.measured.measured) or 0)


def memory(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """The figure; above 16 devices those that are alike share a bar."""
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
    chart.update_yaxes(labels([bar.label for bar in bars]))
    for i, bar in enumerate(bars):
        at = {"x": bar.end, "y": i, "xanchor": "left", "xshift": 4, "showarrow": False}
        chart.add_annotation(text=byte_text(device_memory.bytes_at_peak(bar.device)), **at)
    if limit is not None:
        _draw_limit(chart, limit, colours)
    return chart


def _bars(memory: Memory) -> tuple[list[Bar], int]:
    """The bars, and how many devices are left without one."""
    groups = device_memory.groups(memory)
    if len(memory.per_device) <= EVERY_DEVICE:
        groups = tuple(device_memory.Group((d.device,), d) for d in memory.per_device)
    bars = [
        Bar(device_text(group.devices), group.most, device_memory.measured(memory, group.devices))
        for group in groups[:MOST_BARS]
    ]
    return bars, sum(len(group.devices) for group in groups[MOST_BARS:])


def _role_bars(
    role: str,
    memory: Memory,
    bars: Sequence[Bar],
    colours: Mapping[str, str],
    least: float,
) -> go.Bar:
    sizes = [getattr(bar.device, role) for bar in bars]
    marker: dict[str, Any] = {"color": colours[role], "line": {"width": 0}}
    if role == "other":
        outline = {"width": [int((size or 0) > least) for size in sizes], "color": colours["other"]}
        hatch = {"shape": "/", "size": 5, "fgcolor": colours["other"], "bgcolor": CLEAR}
        marker = {"color": CLEAR, "pattern": hatch, "line": outline}
    return go.Bar(
        name=f"{role} {byte_text(getattr(device_memory.groups(memory)[0].most, role))}",
        orientation="h",
        x=sizes,
        y=list(range(len(bars))),
        customdata=[[bar.label, byte_text(size)] for bar, size in zip(bars, sizes, strict=True)],
        hovertemplate=f"%{{customdata[0]}}<br>{role} <b>%{{customdata[1]}}</b><extra></extra>",
        marker=marker,
    )


def _ticks(bars: Sequence[Bar], colours: Mapping[str, str]) -> go.Scatter:
    """A tick for each bar's measured peak, which tells by how much the computed one is off."""
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
    head, *rest = (span.text for span in words.memory_lead(memory))
    more = f" {count_text(left)} more devices hold less." if left else ""
    note = words.scale_note(memory)
    more += f" {note}" if note else ""
    groups = device_memory.groups(memory)
    alike = len(groups) == 1 and len(groups[0].devices) > 1
    on = "each device" if alike else device_text([groups[0].most.device])
    return frame(head, "".join(rest) + more, f"{on}:", BAR * bars, colours)


def _bytes_axis(end: float, colours: Mapping[str, str]) -> dict[str, Any]:
    """Ticks at multiples of a power of two, told in its unit: 0, 4 GiB, 8 GiB."""
    step = 1
    while end / step > TICKS:
        step *= 2
    ticks = list(range(0, int(end) + 1, step))
    return scale(end, ticks, ["0" if tick == 0 else limit_text(tick) for tick in ticks], colours)
