"""Timeline of a pipeline: actions of each rank, above their ideal form."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.views import words
from jaxshard_magic.views.figures.figure_layout import category_axis, figure_layout, value_axis
from jaxshard_magic.views.html_tags import escaped
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.data import ticks

RANK = 44  # px
LANE, IDEAL, ALONE = 0.5, 0.18, 0.7  # heights of bars, in ranks: with an ideal, of the ideal, without one
BELOW = 0.37  # distance between the middles of a lane and its ideal, in ranks
TICKS = 8
NUMBERED = 400  # actions up to which each shows its microbatch
FAINT = 0.7


def timeline(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """Return the figure: a bar for each action in the colour of its kind, or of the first kind of a fused action.

    Raises:
        ShardError: The report has no pipeline.
    """
    p = report.pipeline
    if p is None:
        raise ShardError("this report is of a step without a pipeline, so it has no timeline figure")
    ideal = data.has_ideal(p)
    lanes = data.lanes(p, p.events)
    chart = go.Figure([_bars(p, lanes, kind, colours, under=False) for kind in data.kinds_of(p)])
    if ideal:
        below = data.lanes(p, p.ideal_events)
        chart.add_traces([_bars(p, below, kind, colours, under=True) for kind in data.kinds_of(p)])
    head = "".join(span.text for span in words.pipeline_lead(p))
    of = f"{words.source_of_times(p)}; thin: ideal" if ideal else words.source_of_times(p)
    chart.update_layout(
        figure_layout(escaped(head), f" {escaped(words.pipeline_about(p))}", of, RANK * len(p.ranks), colours),
        # Each bar has a base of its own. Stacking, set by the shared layout, would shift the bars.
        barmode="overlay",
        bargap=0,
    )
    end = data.end_of(p)
    marks = ticks(end, TICKS, p.unit)
    chart.update_xaxes(value_axis(end, [at for at, _ in marks], [label for _, label in marks], colours))
    chart.update_yaxes(category_axis([f"{words.rank_name(p, i)}  {_share(p, i)}" for i in range(len(p.ranks))]))
    return chart


def _share(p: Pipeline, rank: int) -> str:
    return words.percent_text(p.ranks[rank].bubble)


def _bars(
    p: Pipeline, lanes: Sequence[Sequence[data.LaneEvent]], kind: str, colours: Mapping[str, str], *, under: bool
) -> go.Bar:
    """Return the actions of one kind as bars.

    Args:
        p: Pipeline.
        lanes: Actions of each rank.
        kind: F, B, I or W.
        colours: Colours of the theme.
        under: Whether to draw thin bars in the lane of the ideal form.
    """
    bars = [(rank, mark) for rank, lane in enumerate(lanes) for mark in lane if mark.actions[0].kind == kind]
    numbered = not under and sum(map(len, lanes)) <= NUMBERED
    at = BELOW if under else -0.08 if data.has_ideal(p) else 0.0
    return go.Bar(
        name=f"{kind} {words.KINDS[kind]}",
        # One legend entry for each kind hides and shows both lanes; the ideal form has no entry of its own.
        legendgroup=kind,
        showlegend=not under,
        orientation="h",
        base=[mark.start for _, mark in bars],
        x=[mark.end - mark.start for _, mark in bars],
        y=[rank + at for rank, _ in bars],
        width=IDEAL if under else LANE if data.has_ideal(p) else ALONE,
        opacity=FAINT if under else 1,
        text=[str(mark.actions[0].microbatch) for _, mark in bars] if numbered else None,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 10, "color": colours[f"on-{kind}"]},
        marker={"color": colours[kind], "line": {"width": 0.5, "color": colours["bg"]}},
        customdata=[
            [mark.text, words.time_text(mark.end - mark.start, p.unit), words.time_text(mark.start, p.unit)]
            for _, mark in bars
        ],
        hovertemplate="%{customdata[0]} "
        + ("ideal" if under else escaped(words.source_of_times(p)))
        + "<br><b>%{customdata[1]}</b> from %{customdata[2]}<extra></extra>",
    )
