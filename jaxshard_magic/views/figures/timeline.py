"""What ran when on each rank of a pipeline, above its ideal."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from jaxshard_magic.errors import ShardError
from jaxshard_magic.report import Pipeline, Report
from jaxshard_magic.views import words
from jaxshard_magic.views.figures.look import frame, labels, scale
from jaxshard_magic.views.tags import text
from jaxshard_magic.views.timeline import data
from jaxshard_magic.views.timeline.ticks import ticks

RANK = 44  # px
LANE, IDEAL, ALONE = 0.5, 0.18, 0.7  # of a rank
BELOW = 0.37  # of a rank, from the middle of its lane to that of its ideal
TICKS = 8
NUMBERED = 400  # actions up to which each has its microbatch written on it
FAINT = 0.7


def timeline(report: Report, colours: Mapping[str, str]) -> go.Figure:
    """The figure: a bar for each action, in the colour of its kind; of a fused one the first part's."""
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
        frame(text(head), f" {text(words.pipeline_about(p))}", of, RANK * len(p.ranks), colours),
        barmode="overlay",
        bargap=0,
    )
    end = data.end_of(p)
    marks = ticks(end, TICKS, p.unit)
    chart.update_xaxes(scale(end, [at for at, _ in marks], [label for _, label in marks], colours))
    chart.update_yaxes(labels([f"{words.rank_name(p, i)}  {_share(p, i)}" for i in range(len(p.ranks))]))
    return chart


def _share(p: Pipeline, rank: int) -> str:
    return words.percent_text(p.ranks[rank].bubble)


def _bars(
    p: Pipeline, lanes: Sequence[Sequence[data.Mark]], kind: str, colours: Mapping[str, str], *, under: bool
) -> go.Bar:
    """The actions of one kind, in the lane or, thin, in that of the ideal."""
    bars = [(rank, mark) for rank, lane in enumerate(lanes) for mark in lane if mark.parts[0].kind == kind]
    numbered = not under and sum(map(len, lanes)) <= NUMBERED
    at = BELOW if under else -0.08 if data.has_ideal(p) else 0.0
    return go.Bar(
        name=f"{kind} {words.KINDS[kind]}",
        legendgroup=kind,
        showlegend=not under,
        orientation="h",
        base=[mark.start for _, mark in bars],
        x=[mark.end - mark.start for _, mark in bars],
        y=[rank + at for rank, _ in bars],
        width=IDEAL if under else LANE if data.has_ideal(p) else ALONE,
        opacity=FAINT if under else 1,
        text=[str(mark.parts[0].microbatch) for _, mark in bars] if numbered else None,
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
        + ("ideal" if under else text(words.source_of_times(p)))
        + "<br><b>%{customdata[1]}</b> from %{customdata[2]}<extra></extra>",
    )
