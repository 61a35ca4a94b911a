"""Metrics of a run as HTML without script: charts of the main curves, and all numbers in a table."""

from collections.abc import Sequence

from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views.document.html import NO_MESH, charts_html, parts_html
from jaxshard_magic.views.format import more_text
from jaxshard_magic.views.html_tags import escaped, section, small, table
from jaxshard_magic.views.sections.run import training_parts
from jaxshard_magic.views.training import chart, data


def running(metrics: Metrics, line: str) -> str:
    """Return the metrics of a run in progress, below a line of text.

    Args:
        metrics: Metrics so far.
        line: Plain text of the heading.
    """
    return f"<p><b>{escaped(line)}</b></p>\n{parts_html(training_parts(metrics, page=True), NO_MESH)}\n"


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
            charts.append((f"<b>{escaped(title)}</b>", drawn))
        rows += [
            [escaped(title), escaped(run), *(escaped(data.value_text(c, v)) for v in (c.first, c.last[-1]))]
            for run, c in curves
        ]
    head = [("", "left"), ("run", "wrap"), ("first", "right"), ("last", "right")]
    return section("Curves", small(legend + more_text(known, len(shown))), charts_html(charts), table(head, rows))
