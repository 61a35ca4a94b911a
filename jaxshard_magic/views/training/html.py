"""A run's metrics as HTML without script: charts of what matters most, and every number in a table."""

from collections.abc import Sequence

from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views.format import more_text
from jaxshard_magic.views.tags import joined, section, small, table, text
from jaxshard_magic.views.training import chart, data

_GRID = "display:flex;flex-wrap:wrap;gap:12px 20px;margin:8px 0"
_HEAD = [(name, "right" if name else "left") for name in data.HEADS]


def metrics_section(metrics: Metrics | None) -> str:
    """A section of a report; empty without metrics."""
    if metrics is None:
        return ""
    lead = text(data.lead_text(metrics).rstrip("."))
    return section(f"Training: {lead}", body(metrics))


def running(metrics: Metrics, line: str) -> str:
    """A training while it runs, headed by `line`."""
    return f"<p><b>{text(line)}</b></p>\n{body(metrics)}\n"


def body(metrics: Metrics) -> str:
    """Charts, the table, and notes."""
    charts = [
        _chart(f"<b>{text(data.label_of(curve))}</b> {text(data.newest_text(curve))}", drawn)
        for curve in data.drawn(metrics)
        if (drawn := chart.chart([curve]))
    ]
    figures = table(_HEAD, [[text(each) for each in row] for row in data.rows(metrics)])
    notes = small("<br>".join(map(text, data.notes(metrics))))
    return joined([f'<div style="{_GRID}">{joined(charts)}</div>' if charts else "", figures, notes])


def curves_section(runs: Sequence[tuple[str, Metrics | None]]) -> str:
    """The curves of several runs over each other, by the names of the runs; empty where no two have one in common."""
    shown, every = data.over_each_other(runs)
    if not every:
        return ""
    known = sum(metrics is not None for _, metrics in runs)
    legend = " &nbsp; ".join(f"{chart.sample_of(i)} {text(name)}" for i, (name, _) in enumerate(shown))
    charts, rows = [], []
    for curves in every:
        drawn = chart.chart([c for _, c in curves], [run for run, _ in curves])
        title = data.label_of(curves[0][1])
        if drawn and len(charts) < data.CHARTS:
            charts.append(_chart(f"<b>{text(title)}</b>", drawn))
        rows += [
            [text(title), text(run), *(text(data.value_text(c, v)) for v in (c.first, c.last[-1]))]
            for run, c in curves
        ]
    head = [("", "left"), ("run", "wrap"), ("first", "right"), ("last", "right")]
    grid = f'<div style="{_GRID}">{joined(charts)}</div>'
    return section("Curves", small(legend + more_text(known, len(shown))), grid, table(head, rows))


def _chart(title: str, drawn: str) -> str:
    return f"<div><small>{title}</small><br>{drawn}</div>"
