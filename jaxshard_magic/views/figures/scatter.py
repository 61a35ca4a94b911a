"""Peak memory against step time of compared trials, with the Pareto front."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.views import words
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison.plane import PlotArea, PlotAxis, PointLabel, axes_for, place_labels
from jaxshard_magic.views.figures.figure_layout import CLEAR, figure_layout
from jaxshard_magic.views.format import byte_text, limit_text, seconds_text, share_text
from jaxshard_magic.views.html_tags import escaped

WIDTH, HEIGHT = 700, 300  # px for the placement of names; a page may be wider
FRONT, OTHERS, UNUSABLE = "on the Pareto front", "others", "does not fit, or has other numbers"


def scatter(comparison: Comparison, colours: Mapping[str, str]) -> go.Figure:
    """Return the figure, with a point for each trial that has a step time and a peak.

    Raises:
        ShardError: No trial has both.
    """
    points = data.trial_points(comparison)
    if not points:
        raise ShardError("no trial of this comparison has both a step time and a peak memory, so it has no figure")
    limit = data.limit_of(comparison)
    seconds, size = axes_for(points, limit)
    named = place_labels(PlotArea(seconds, size, WIDTH, HEIGHT, 0, 0, 0, 0), points, limit)
    adjacent_labels = {id(label.point): label for label in named if label.text_position}
    chart = go.Figure()
    _draw_front(chart, [point for point in points if point.on_front], seconds, size, colours)
    if any(point.predicted is not None for point in points):
        chart.add_trace(_tails(points, seconds, size, colours))
    for name, group in _groups(points).items():
        chart.add_trace(_marks(comparison, name, group, adjacent_labels, seconds, size, colours))
    lead = "".join(span.text for span in words.comparison_lead(comparison))
    head, _, rest = lead.partition(". ")
    chart.update_layout(figure_layout(f"{escaped(head.rstrip('.'))}.", f" {escaped(rest)}", "trials", HEIGHT, colours))
    chart.update_layout(margin_l=56, margin_b=48)
    source = words.source_text(comparison)
    chart.update_xaxes(_axis(seconds, f"step time, {seconds.unit} ({source})", colours))
    chart.update_yaxes(_axis(size, f"peak memory, {size.unit}", colours))
    if limit is not None:
        _draw_limit(chart, limit, size, colours)
    return chart


def _groups(points: Sequence[data.TrialPoint]) -> dict[str, list[data.TrialPoint]]:
    groups: dict[str, list[data.TrialPoint]] = {FRONT: [], OTHERS: [], UNUSABLE: []}
    for point in points:
        groups[FRONT if point.on_front else OTHERS if point.usable else UNUSABLE].append(point)
    return {name: group for name, group in groups.items() if group}


def _draw_front(
    chart: go.Figure, front: Sequence[data.TrialPoint], seconds: PlotAxis, size: PlotAxis, colours: Mapping[str, str]
) -> None:
    """Draw the staircase through the front, to the edges of the plot."""
    if not front:
        return
    ordered = sorted(front, key=lambda p: (p.seconds, p.peak))
    x = [ordered[0].seconds, *(point.seconds for point in ordered), seconds.high]
    y = [size.high, *(point.peak for point in ordered), ordered[-1].peak]
    chart.add_scatter(
        x=[value / seconds.scale for value in x],
        y=[value / size.scale for value in y],
        mode="lines",
        line={"shape": "hv", "dash": "4px 2px", "width": 1, "color": colours["ink-2"]},
        hoverinfo="skip",
        showlegend=False,
    )


def _tails(
    points: Sequence[data.TrialPoint], seconds: PlotAxis, size: PlotAxis, colours: Mapping[str, str]
) -> go.Scatter:
    """Return lines from the predicted to the measured step time of each point."""
    pairs = [(p, p.predicted) for p in points if p.predicted is not None]
    return go.Scatter(
        name="from the prediction",
        # None ends a line: plotly draws all tails as one trace with one entry in the legend.
        x=[v for p, tail in pairs for v in (tail / seconds.scale, p.seconds / seconds.scale, None)],
        y=[v for p, _ in pairs for v in (p.peak / size.scale, p.peak / size.scale, None)],
        mode="lines",
        line={"width": 1, "color": colours["ink-2"]},
        hoverinfo="skip",
    )


def _marks(
    comparison: Comparison,
    name: str,
    points: Sequence[data.TrialPoint],
    beside: Mapping[int, PointLabel],
    seconds: PlotAxis,
    size: PlotAxis,
    colours: Mapping[str, str],
) -> go.Scatter:
    names = [beside.get(id(point)) for point in points]
    ink = colours["error" if name == UNUSABLE else "ink"]
    marker: dict[str, Any] = {"size": 10, "color": ink if name == FRONT else CLEAR}
    marker |= {"symbol": "x-thin" if name == UNUSABLE else "circle", "line": {"width": 1.5, "color": ink}}
    return go.Scatter(
        name=name,
        x=[point.seconds / seconds.scale for point in points],
        y=[point.peak / size.scale for point in points],
        mode="markers+text",
        text=["" if label is None else escaped(label.text) for label in names],
        textposition=["middle right" if label is None else label.text_position for label in names],
        textfont={"size": 11, "color": colours["ink" if name == FRONT else "ink-2"]},
        marker=marker,
        customdata=[_told(comparison, point) for point in points],
        hovertemplate="%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>",
    )


def _told(comparison: Comparison, point: data.TrialPoint) -> list[str]:
    """Return the hover text of a point: names, step time and peak."""
    limit = data.limit_of(comparison)
    tail = "" if point.predicted is None else f", predicted {seconds_text(point.predicted)}"
    share = "" if limit is None else f", {share_text(point.peak / limit)} of {limit_text(limit)}"
    return [
        "<br>".join(f"<b>{escaped(name)}</b>" for name in point.names),
        f"{seconds_text(point.seconds)} {words.source_text(comparison)}{tail}",
        f"{byte_text(point.peak)}{share}",
    ]


def _draw_limit(chart: go.Figure, limit: int, size: PlotAxis, colours: Mapping[str, str]) -> None:
    told = {"text": f"limit {limit_text(limit)}", "font": {"color": colours["error"]}}
    told |= {"xanchor": "right", "yanchor": "bottom"}
    if limit <= size.high:
        chart.add_hline(limit / size.scale, line={"color": colours["error"], "width": 2}, annotation=told)
        return
    told["text"] += " is above the plot \u2191"
    chart.add_annotation(told | {"xref": "paper", "yref": "paper", "x": 1, "y": 1, "showarrow": False})


def _axis(axis: PlotAxis, title: str, colours: Mapping[str, str]) -> dict[str, Any]:
    return {
        "title": {"text": title, "font": {"size": 12}, "standoff": 8},
        "range": [axis.low / axis.scale, axis.high / axis.scale],
        "gridcolor": colours["line"],
        "nticks": 7,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 6,
        "tickcolor": CLEAR,
        "tickfont": {"color": colours["ink-2"]},
    }
