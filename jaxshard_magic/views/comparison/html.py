"""Comparison of strategies as HTML without script: answers, a table of trials with bars, the chart of peak memory
against step time, the curves of the runs, and the line that runs each trial again."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.report.parts import finite_or_none, mesh_text
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.comparison import chart, data
from jaxshard_magic.views.document.html import charts_html
from jaxshard_magic.views.format import UNKNOWN, byte_text, flops_text, limit_text, more_text, printable
from jaxshard_magic.views.html_tags import (
    SIGNS,
    axis,
    document,
    escaped,
    join_nonempty,
    row,
    section,
    small,
    table,
    unbroken,
)
from jaxshard_magic.views.sections.comparison import omissions
from jaxshard_magic.views.training import chart as curve_chart
from jaxshard_magic.views.training import data as run_data

_SIGNS = SIGNS | {"ok": "\u2714\ufe0e"}
_SPACE = "padding:4px 8px 4px 0"
_NAME, _WIDE, _NARROW = "17%", "11%", "7%"  # widths of columns: names, wide and narrow bars
_FEW = 16  # letters of a mesh that is not broken, at most
_INK, _QUIET = 'fill="currentColor" fill-opacity=".7"', 'fill="currentColor" fill-opacity=".5"'


def to_html(comparison: Comparison) -> str:
    """Render the comparison as an HTML fragment without script, for a notebook or a page."""
    lead = "".join(
        f"<b>{unbroken(span.text)}</b>" if span.kind == "strong" else unbroken(span.text)
        for span in words.comparison_lead(comparison)
    )
    notes = [*words.comparison_notes(comparison), *omissions(comparison)]
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        small(escaped(words.comparison_about(comparison))),
        trials_table(comparison),
        chart.chart_with_notes(comparison),
        curves_section(data.trial_metrics(comparison)),
        rerun_section(comparison),
        small("<br>".join(map(escaped, notes))),
    ]
    return f'<div class="jss">\n{join_nonempty(parts)}\n</div>\n'


def page(comparison: Comparison) -> str:
    """Render the comparison as a whole HTML document; the theme, light or dark, is the reader's."""
    return document(printable(f"{comparison.name or 'step'}, compared"), to_html(comparison))


@dataclass(frozen=True)
class _TrialTable:
    """Comparison with the scales of its bars.

    Attributes:
        comparison: Comparison to show.
        sent: Columns of bytes sent.
        mesh: All axes of all trials.
        names: Name of each trial, by key.
        bubbles: Whether some trial has a pipeline bubble.
        most_peak: Bytes at the end of the scale of peaks: the largest peak, or the limit if larger.
        most_seconds: Seconds at the end of the scale of step times.
    """

    comparison: Comparison
    sent: data.SentColumns
    mesh: MeshInfo
    names: dict[str, words.TrialName]
    bubbles: bool
    most_peak: float
    most_seconds: float

    @property
    def columns(self) -> int:
        """Number of columns with figures, between "fits" and "same numbers"."""
        return 3 + len(self.sent.names) + self.bubbles


def trials_table(comparison: Comparison) -> str:
    """Return a table with a row for each trial; a failed trial has its reason and a fix instead of figures."""
    if not comparison.trials:
        return ""
    limit = data.limit_of(comparison)
    times = (finite_or_none(comparison.seconds(t) or t.predicted) for t in comparison.trials)
    shown = _TrialTable(
        comparison,
        data.sent_columns(comparison),
        data.merged_mesh(comparison),
        words.trial_names(comparison),
        any(trial.bubble is not None for trial in comparison.trials),
        max([limit or 1, *(trial.peak or 0 for trial in comparison.trials)]),
        max((s for s in times if s is not None), default=0.0),
    )
    rows = join_nonempty(_row(shown, trial) for trial in data.sorted_trials(comparison))
    heads = _heads(shown, limit)
    return f'<table width="100%" style="width:100%"><thead>{heads}</thead><tbody>\n{rows}</tbody></table>'


def _cell(
    content: str, align: str = "left", tag: str = "td", *, span: int = 1, width: str = "", style: str = ""
) -> str:
    """Return a cell of a dense table. A cell with a `width` does not break into lines.

    Args:
        content: HTML.
        align: Horizontal alignment.
        tag: "td" or "th".
        span: Number of columns.
        width: Width attribute; "" for none.
        style: Further CSS.
    """
    more = (f' colspan="{span}"' if span > 1 else "") + (f' width="{width}"' if width else "")
    place = "bottom" if tag == "th" else "top"
    said = f"text-align:{align};vertical-align:{place};{_SPACE}{';white-space:nowrap' * bool(width)}{style}"
    # Alignment is an attribute and a style: GitHub drops styles, and keeps attributes.
    return f'<{tag} align="{align}" valign="{place}"{more} style="{said}">{content}</{tag}>'


def _heads(shown: _TrialTable, limit: int | None) -> str:
    source = words.source_text(shown.comparison)
    sent = shown.sent
    cells = [
        _cell("strategy", tag="th", width=_NAME),
        _cell("fits", tag="th"),
        _cell(f"peak of<br>{limit_text(limit)}" if limit else "peak", "right", "th", width=_WIDE),
        _cell(f"step time<br>{source} \u2191" if source else "step time", "right", "th", width=_WIDE),
        *(_cell(_over(shown, name), "right", "th", width=_NARROW) for name in sent.names),
        *([_cell("bubble", "right", "th", width=_NARROW)] * shown.bubbles),
        _cell("FLOPs", "right", "th", width=_NARROW),
        _cell("same<br>numbers", tag="th"),
    ]
    if not sent.names:
        return row(cells)
    over, bare = f"sent per device and step, {sent.unit}", ";border-bottom:0"
    groups = _cell("", tag="th", span=4, style=bare), _cell(over, tag="th", span=len(cells) - 4, style=bare)
    return row(groups) + row(cells)


def _over(shown: _TrialTable, name: str) -> str:
    """Return the heading of a column of bytes sent, each axis in its hue."""
    parts = name.split("+")
    if all(part in shown.mesh.axes for part in parts):
        return "+".join(axis(part, shown.mesh) for part in parts)
    return escaped(data.column_title(name))


def _row(shown: _TrialTable, trial: Trial) -> str:
    name = [_cell(_name(shown, trial))]
    fits = _cell(_answer(words.fits_answer(trial)), width="1%")
    if data.has_failed(trial):
        return row([*name, fits, *_failure(shown, trial)])
    over = zip(shown.sent.names, shown.sent.bytes_of(trial), strict=True)
    cells = [
        fits,
        _peak(shown, trial),
        _step(shown, trial),
        *(_sent(shown, axes, size) for axes, size in over),
        *([_bubble(trial)] * shown.bubbles),
        _figure(flops_text(data.flops_of(trial)), "", _NARROW),
        _cell(_answer(words.same_answer(trial))),
    ]
    return row([*name, *cells])


def _name(shown: _TrialTable, trial: Trial) -> str:
    """Return strategy and options, and below them the mesh, each axis in its hue."""
    name = shown.names[trial.key]
    mesh = " ".join(f"{axis(a, shown.mesh)}={size}" for a, size in trial.mesh.items())
    space = ";white-space:nowrap" if len(mesh_text(trial.mesh)) <= _FEW else ""
    options = f" {unbroken(name.options)}" if name.options else ""
    return (
        f'<code><b>{escaped(name.strategy)}</b>{options}</code><br><code style="font-size:10.5px{space}">{mesh}</code>'
    )


def _answer(answer: words.SignedAnswer) -> str:
    said = escaped(answer.word)
    if answer.sign is None:
        return f"<small>{said}</small>"
    sign = f'<span class="jss-{answer.sign}">{_SIGNS[answer.sign]}'
    told = f"{sign} {said}</span>" if answer.sign == "error" else f"{sign}</span> {said}"
    more = f" <small>{escaped(answer.more)}</small>" if answer.more else ""
    return f'<span style="white-space:nowrap">{told}</span>{more}'


def _failure(shown: _TrialTable, trial: Trial) -> list[str]:
    """Return the cells of a failed trial: the peak if it was compiled, then the reason and the fix."""
    head, rest = words.failure_parts(trial)
    why = f"<b>{escaped(head)}</b> {escaped(rest)}".rstrip()
    fix = "<br>".join(_typed(line) for line in (trial.fix or "").splitlines())
    message = f"{why}. Try {fix}" if fix else f"{why}."
    peak = [] if trial.peak is None else [_peak(shown, trial)]
    return [*peak, _cell(message, span=shown.columns + 1 - len(peak))]


def _typed(line: str) -> str:
    return f"<code>{unbroken(line)}</code>"


def _figure(told: str, bar: str, width: str) -> str:
    """Return a cell with a figure above a bar; without a bar an empty one keeps all figures at one height."""
    return _cell(f"{told}{bar or svg.cell_bar(0, '')}", "right", width=width)


def _peak(shown: _TrialTable, trial: Trial) -> str:
    if trial.peak is None:
        return _figure(UNKNOWN, "", _WIDE)
    paint = f'class="jss-limit" fill="{svg.LIMIT}"' if trial.fits is False else svg.role_paint("temporaries")
    bar = svg.cell_bar(trial.peak / shown.most_peak, paint)
    return _figure(byte_text(trial.peak), bar, _WIDE)


def _step(shown: _TrialTable, trial: Trial) -> str:
    """Return the cell of the step time. The bar of a predicted time is hollow; beside a measured time the prediction is
    a tick."""
    comparison, most = shown.comparison, shown.most_seconds
    time_text, predicted = words.step_text(comparison, trial), trial.predicted
    if time_text == UNKNOWN or not most:
        return _figure(UNKNOWN, "", _WIDE)
    if words.is_predicted(comparison, trial):
        time_text += " <small>predicted</small>"
    seconds = comparison.seconds(trial)
    hollow = seconds is None or comparison.source == "predicted"
    tail = words.comparable_prediction(comparison, trial)
    tick = None if tail is None else tail / most
    length = (predicted or 0.0) if seconds is None else seconds
    bar = svg.cell_bar(length / most, _INK, tick, hollow=hollow)
    return _figure(time_text, bar, _WIDE)


def _sent(shown: _TrialTable, name: str, size: int | None) -> str:
    if size is None:
        return _figure(UNKNOWN, "", _NARROW)
    first = name.split("+")[0]
    known = first in shown.mesh.axes
    paint = svg.fill(svg.axis_index(first, shown.mesh)) if known else _QUIET
    return _figure(shown.sent.text(size), svg.cell_bar(size / (shown.sent.largest or 1), paint), _NARROW)


def _bubble(trial: Trial) -> str:
    if trial.bubble is None:
        return _figure(UNKNOWN, "", _NARROW)
    pipeline = None if trial.report is None else trial.report.pipeline
    hollow = pipeline is None or pipeline.bubble.measured is None
    bar = svg.cell_bar(trial.bubble, _QUIET, hollow=hollow)
    return _figure(words.percent_text(trial.bubble), bar, _NARROW)


def rerun_section(comparison: Comparison) -> str:
    """Return a table with the line to run each trial again, predictions, shares of the limit, and the Pareto front."""
    shown = [trial for trial in data.sorted_trials(comparison) if trial.report is not None]
    if not shown:
        return ""
    names = words.trial_names(comparison)
    predicted = [words.prediction_text(comparison, t) for t in shown]
    shares = [words.limit_share(t) for t in shown]
    head, columns = [("strategy", "wrap")], [[_typed(names[t.key].text) for t in shown]]
    if any(numbers := [words.report_text(t) for t in shown]):
        head.append(("report", "right"))
        columns.append([number or UNKNOWN for number in numbers])
    if any(predicted):
        head.append(("predicted", "right"))
        columns.append([prediction or UNKNOWN for prediction in predicted])
    if any(shares):
        head.append(("of the limit", "right"))
        columns.append([share or UNKNOWN for share in shares])
    head += [("on the Pareto front", "wrap"), ("run it again as", "wrap")]
    columns.append([unbroken(words.front_text(comparison, t)) for t in shown])
    columns.append([_typed(f"%%shard {t.line}") for t in shown])
    return section("Each trial", table(head, zip(*columns, strict=True)))


def curves_section(runs: Sequence[tuple[str, Metrics | None]]) -> str:
    """Return the curves of several runs over each other; empty if no two runs share a number.

    Args:
        runs: (name, metrics) of each run; None for a run without metrics.
    """
    shown, every = run_data.shared_curves(runs)
    if not every:
        return ""
    known = sum(metrics is not None for _, metrics in runs)
    legend = " &nbsp; ".join(f"{curve_chart.legend_line(i)} {escaped(name)}" for i, (name, _) in enumerate(shown))
    charts, rows = [], []
    for curves in every:
        drawn = curve_chart.chart([c for _, c in curves], [run for run, _ in curves])
        title = run_data.label_of(curves[0][1])
        if drawn and len(charts) < run_data.CHARTS:
            charts.append((f"<b>{escaped(title)}</b>", drawn))
        for run, c in curves:
            cells = (title, run, run_data.value_text(c, c.first), run_data.newest_text(c))
            rows.append([escaped(cell) for cell in cells])
    head = [("", "left"), ("run", "wrap"), ("first", "right"), ("last", "right")]
    return section("Curves", small(legend + more_text(known, len(shown))), charts_html(charts), table(head, rows))
