"""Charts to zoom, restyle and save, as plotly figures in the report's look."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError, did_you_mean, one_of
from jaxshard_magic.report import DeviceMemory, Memory, Report
from jaxshard_magic.views import memory as mem
from jaxshard_magic.views import words
from jaxshard_magic.views.colours import THEMES
from jaxshard_magic.views.format import byte_text, count_text, device_text, limit_text

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
BAR, TOP, BOTTOM, SIDE, LINE = 24, 84, 32, 16, 32  # px
EVERY_DEVICE = 16  # more than these share a bar where they are alike
MOST_BARS = 40
TICKS = 6
SEEN = 0.003  # of the width: what is smaller gets no outline
CLEAR = "rgba(0,0,0,0)"


def figure(report: Report, name: str, theme: str = "light") -> go.Figure:
    """The figure `name` of `report`, "memory", on a "light" or "dark" ground.

    Raises ShardError for other names, and for a report without that part.
    """
    if name not in _FIGURES:
        allowed = one_of(_FIGURES)
        raise ShardError(f"no figure {name!r}; the figures are {allowed}.{did_you_mean(str(name), _FIGURES)}")
    if theme not in THEMES:
        near = did_you_mean(str(theme), THEMES)
        raise ShardError(f"no theme {theme!r}; the themes are {one_of(THEMES)}.{near}")
    return _FIGURES[name](report, THEMES[theme])


def memory(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """What each device holds by role, against the limit; above 16 devices those that are alike share a bar."""
    if report.memory is None or not report.memory.per_device:
        raise ShardError("this report knows nothing of memory, so it has no memory figure")
    bars, left = _bars(report.memory)
    limit = mem.limit(report.memory)
    full = max(1, limit or 0, *(_end(device) for _, device in bars))
    least = SEEN * full
    chart = go.Figure(
        [_role_bars(role, report.memory, bars, colours, least) for role in _roles(report.memory)]
    )
    chart.update_layout(_frame(report.memory, len(bars), left, colours))
    chart.update_xaxes(_bytes_axis(full * 1.08, colours))
    chart.update_yaxes(
        autorange="reversed",
        tickvals=list(range(len(bars))),
        ticktext=[label for label, _ in bars],
        ticks="outside",
        ticklen=6,
        tickcolor=CLEAR,
        automargin=True,
        showgrid=False,
        zeroline=False,
    )
    for i, (_, device) in enumerate(bars):
        at = {"x": _end(device), "y": i, "xanchor": "left", "xshift": 4, "showarrow": False}
        chart.add_annotation(text=byte_text(mem.held(device)), **at)
    if limit is not None:
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
    return chart


_FIGURES: dict[str, Callable[[Report, Mapping[str, str]], go.Figure]] = {"memory": memory}


def _bars(memory: Memory) -> tuple[list[tuple[str, DeviceMemory]], int]:
    """Label and memory of each bar, and how many devices are left without one."""
    if len(memory.per_device) <= EVERY_DEVICE:
        return [(device_text([d.device]), d) for d in memory.per_device], 0
    groups = mem.groups(memory)
    left = sum(len(group.devices) for group in groups[MOST_BARS:])
    return [(device_text(group.devices), group.most) for group in groups[:MOST_BARS]], left


def _end(device: DeviceMemory) -> int:
    return max(mem.held(device), sum(size for _, size in mem.segments(device)))


def _roles(memory: Memory) -> list[str]:
    return [role for role in mem.ROLES if any(getattr(device, role) for device in memory.per_device)]


def _role_bars(
    role: str,
    memory: Memory,
    bars: Sequence[tuple[str, DeviceMemory]],
    colours: Mapping[str, str],
    least: float,
) -> go.Bar:
    sizes = [getattr(device, role) for _, device in bars]
    marker: dict[str, Any] = {"color": colours[role], "line": {"width": 0}}
    if role == "other":
        outline = {"width": [int((size or 0) > least) for size in sizes], "color": colours["other"]}
        hatch = {"shape": "/", "size": 5, "fgcolor": colours["other"], "bgcolor": CLEAR}
        marker = {"color": CLEAR, "pattern": hatch, "line": outline}
    return go.Bar(
        name=f"{role} {byte_text(getattr(mem.groups(memory)[0].most, role))}",
        orientation="h",
        x=sizes,
        y=list(range(len(bars))),
        customdata=[[label, byte_text(size)] for (label, _), size in zip(bars, sizes, strict=True)],
        hovertemplate=f"%{{customdata[0]}}<br>{role} <b>%{{customdata[1]}}</b><extra></extra>",
        marker=marker,
    )


def _frame(memory: Memory, bars: int, left: int, colours: Mapping[str, str]) -> dict[str, Any]:
    head, *rest = (span.text for span in words.memory_lead(memory))
    more = f" {count_text(left)} more devices hold less." if left else ""
    groups = mem.groups(memory)
    alike = len(groups) == 1 and len(groups[0].devices) > 1
    on = "each device" if alike else device_text([groups[0].most.device])
    height = TOP + BAR * bars + BOTTOM
    return {
        "template": "none",
        "barmode": "stack",
        "bargap": 0.3,
        "height": height,
        "margin": {"l": SIDE, "r": SIDE, "t": TOP, "b": BOTTOM},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {"family": FONT, "size": 12, "color": colours["ink"]},
        "title": {
            "text": f"<b>{head}</b>{''.join(rest)}{more}",
            "font": {"size": 13},
            "x": 0,
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 8, "l": SIDE},
        },
        "legend": {
            "title": {"text": f"{on}:", "font": {"size": 12, "color": colours["ink-2"]}},
            "orientation": "h",
            "traceorder": "normal",
            "bgcolor": CLEAR,
            "xref": "container",
            "x": 0.01,
            "yref": "container",
            "y": 1 - LINE / height,
            "yanchor": "top",
        },
        "hoverlabel": {"bgcolor": colours["bg"], "bordercolor": colours["line"], "font": {"family": FONT}},
    }


def _bytes_axis(end: float, colours: Mapping[str, str]) -> dict[str, Any]:
    """Ticks at multiples of a power of two, told in its unit: 0, 4 GiB, 8 GiB."""
    step = 1
    while end / step > TICKS:
        step *= 2
    ticks = list(range(0, int(end) + 1, step))
    return {
        "range": [0, end],
        "tickvals": ticks,
        "ticktext": ["0" if tick == 0 else limit_text(tick) for tick in ticks],
        "gridcolor": colours["line"],
        "zeroline": False,
        "ticks": "",
        "tickfont": {"color": colours["ink-2"]},
    }
