"""Metrics of a run as HTML without script: charts of the main curves, and all numbers in a table."""

from collections.abc import Sequence

from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views.format import more_text
from jaxshard_magic.views.html_tags import escaped, join_nonempty, section, small, table
from jaxshard_magic.views.training import chart, data

_GRID = "display:flex;flex-wrap:wrap;gap:12px 20px;margin:8px 0"
_HEAD = [(name, "right" if name else "left") for name in data.HEADS]


def metrics_section(metrics: Metrics | None) -> str:
    """Return the section of a report on metrics; empty without metrics."""
    if metrics is None:
        return ""
    lead = escaped(data.summary_text(metrics).rstrip("."))
    return section(f"Training: {lead}", body(metrics))


def running(metrics: Metrics, line: str) -> str:
    """Return the metrics of a run in progress, below a line of text.

    Args:
        metrics: Metrics so far.
        line: Plain text of the heading.
    """
    return f"<p><b>{escaped(line)}</b></p>\n{body(metrics)}\n"


def body(metrics: Metrics) -> str:
    """Return charts, table and notes."""
    charts = [
        _chart(f"<b>{escaped(data.label_of(curve))}</b> {escaped(data.newest_text(curve))}", drawn)
        for curve in data.charted_curves(metrics)
        if (drawn := chart.chart([curve]))
    ]
    figures = table(_HEAD, [[escaped(each) for each in row] for row in data.rows(metrics)])
    notes = small("<br>".join(map(escaped, data.notes(metrics))))
    return join_nonempty([f'<div style="{_GRID}">{join_nonempty(charts)}</div>' if charts else "", figures, notes])


def curves_section(runs: Sequence[tuple[str, Metrics | None]]) -> str:
    """Return the curves of several runs over each other; empty if no two runs share a number.

    Args:
        runs: (name, metrics) of each run; None for a run without metrics.
    """
    shown, every = data.shared_curves(runs)
    if not every:
        return ""
    known = sum(metrics is not None for _, metrics in runs)
    legend = " &nbsp; ".join(f"{chart.legend_line(i)} {escaped(name)}" for i, (name, _) in enumerate(shown))
    charts, rows = [], []
    for curves in every:
        drawn = chart.chart([c for _, c in curves], [run for run, _ in curves])
        title = data.label_of(curves[0][1])
        if drawn and len(charts) < data.CHARTS:
            charts.append(_chart(f"<b>{escaped(title)}</b>", drawn))
        rows += [
            [escaped(title), escaped(run), *(escaped(data.value_text(c, v)) for v in (c.first, c.last[-1]))]
            for run, c in curves
        ]
    head = [("", "left"), ("run", "wrap"), ("first", "right"), ("last", "right")]
    grid = f'<div style="{_GRID}">{join_nonempty(charts)}</div>'
    return section("Curves", small(legend + more_text(known, len(shown))), grid, table(head, rows))


def _chart(title: str, drawn: str) -> str:
    return f"<div><small>{title}</small><br>{drawn}</div>"
