"""A comparison of strategies as HTML without script: its answers, a row for each trial with bars, the chart of peak
memory against step time, and the line that runs each again."""

from dataclasses import dataclass

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.parts import finite, mesh_text
from jaxshard_magic.views import svg, words
from jaxshard_magic.views.comparison import chart, data
from jaxshard_magic.views.comparison.text import left_out
from jaxshard_magic.views.format import UNKNOWN, byte_text, limit_text, printable
from jaxshard_magic.views.html import SIGNS
from jaxshard_magic.views.option_table import flops_text
from jaxshard_magic.views.page import document
from jaxshard_magic.views.tags import axis, joined, row, section, small, table, text, unbroken
from jaxshard_magic.views.training.html import curves_section

_SIGNS = SIGNS | {"ok": "\u2714\ufe0e"}
_SPACE = "padding:4px 8px 4px 0"
_NAME, _WIDE, _NARROW = "17%", "11%", "7%"  # of the table: a name, and columns with bars
_FEW = 16  # letters of a mesh that stay on a line
_INK, _QUIET = 'fill="currentColor" fill-opacity=".7"', 'fill="currentColor" fill-opacity=".5"'


def to_html(comparison: Comparison) -> str:
    """The comparison as a fragment to stand in a notebook or a page, without script."""
    lead = "".join(
        f"<b>{unbroken(span.text)}</b>" if span.kind == "strong" else unbroken(span.text)
        for span in words.comparison_lead(comparison)
    )
    notes = [*words.comparison_notes(comparison), *left_out(comparison)]
    parts = [
        f'<p class="jss-verdict">{lead}</p>',
        small(text(words.comparison_about(comparison))),
        trials(comparison),
        chart.scatter(comparison),
        curves_section(data.runs_of(comparison)),
        again(comparison),
        small("<br>".join(map(text, notes))),
    ]
    return f'<div class="jss">\n{joined(parts)}\n</div>\n'


def page(comparison: Comparison) -> str:
    """The comparison as a whole document that follows the reader's light or dark theme."""
    return document(printable(f"{comparison.name or 'step'}, compared"), to_html(comparison))


@dataclass(frozen=True)
class _Shown:
    """A comparison with the scales of its bars."""

    comparison: Comparison
    sent: data.Sent
    mesh: MeshInfo
    names: dict[str, words.Name]
    bubbles: bool
    most_peak: float
    most_seconds: float

    @property
    def columns(self) -> int:
        """Those of figures, between the names and whether it fits, and the numbers."""
        return 3 + len(self.sent.names) + self.bubbles


def trials(comparison: Comparison) -> str:
    """A row for each trial; of one that could not run, why and what would change that."""
    if not comparison.trials:
        return ""
    limit = data.limit_of(comparison)
    times = (finite(comparison.seconds(t) or t.predicted) for t in comparison.trials)
    shown = _Shown(
        comparison,
        data.sent_of(comparison),
        data.axes_of(comparison),
        words.trial_names(comparison),
        any(trial.bubble is not None for trial in comparison.trials),
        max([limit or 1, *(trial.peak or 0 for trial in comparison.trials)]),
        max((s for s in times if s is not None), default=0.0),
    )
    rows = joined(_row(shown, trial) for trial in data.in_order(comparison))
    heads = _heads(shown, limit)
    return f'<table width="100%" style="width:100%"><thead>{heads}</thead><tbody>\n{rows}</tbody></table>'


def _cell(
    content: str, align: str = "left", tag: str = "td", *, span: int = 1, width: str = "", style: str = ""
) -> str:
    """A cell of a table whose columns stand close; those with a `width` do not break into lines."""
    more = (f' colspan="{span}"' if span > 1 else "") + (f' width="{width}"' if width else "")
    place = "bottom" if tag == "th" else "top"
    said = f"text-align:{align};vertical-align:{place};{_SPACE}{';white-space:nowrap' * bool(width)}{style}"
    return f'<{tag} align="{align}" valign="{place}"{more} style="{said}">{content}</{tag}>'


def _heads(shown: _Shown, limit: int | None) -> str:
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


def _over(shown: _Shown, name: str) -> str:
    """The head of a column of bytes sent, each axis in its hue."""
    parts = name.split("+")
    if all(part in shown.mesh.axes for part in parts):
        return "+".join(axis(part, shown.mesh) for part in parts)
    return text(data.over_text(name))


def _row(shown: _Shown, trial: Trial) -> str:
    name = [_cell(_name(shown, trial))]
    fits = _cell(_answer(words.fits_answer(trial)), width="1%")
    if data.failed(trial):
        return row([*name, fits, *_failure(shown, trial)])
    over = zip(shown.sent.names, shown.sent.of(trial), strict=True)
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


def _name(shown: _Shown, trial: Trial) -> str:
    """Strategy and options, and below them the mesh, each axis in its hue."""
    name = shown.names[trial.key]
    mesh = " ".join(f"{axis(a, shown.mesh)}={size}" for a, size in trial.mesh.items())
    space = ";white-space:nowrap" if len(mesh_text(trial.mesh)) <= _FEW else ""
    options = f" {unbroken(name.options)}" if name.options else ""
    return (
        f"<code><b>{text(name.strategy)}</b>{options}</code><br>"
        f'<code style="font-size:10.5px{space}">{mesh}</code>'
    )


def _answer(answer: words.Answer) -> str:
    said = text(answer.word)
    if answer.sign is None:
        return f"<small>{said}</small>"
    sign = f'<span class="jss-{answer.sign}">{_SIGNS[answer.sign]}'
    told = f"{sign} {said}</span>" if answer.sign == "error" else f"{sign}</span> {said}"
    more = f" <small>{text(answer.more)}</small>" if answer.more else ""
    return f'<span style="white-space:nowrap">{told}</span>{more}'


def _failure(shown: _Shown, trial: Trial) -> list[str]:
    """Why it has no figures, with the peak of one that was compiled."""
    head, rest = words.not_run(trial)
    why = f"<b>{text(head)}</b> {text(rest)}".rstrip()
    fix = "<br>".join(_typed(line) for line in (trial.fix or "").splitlines())
    said = f"{why}. Try {fix}" if fix else f"{why}."
    peak = [] if trial.peak is None else [_peak(shown, trial)]
    return [*peak, _cell(said, span=shown.columns + 1 - len(peak))]


def _typed(line: str) -> str:
    return f"<code>{unbroken(line)}</code>"


def _figure(told: str, bar: str, width: str) -> str:
    """A figure above its bar; without one it stands at the same height."""
    return _cell(f"{told}{bar or svg.cell_bar(0, '')}", "right", width=width)


def _peak(shown: _Shown, trial: Trial) -> str:
    if trial.peak is None:
        return _figure(UNKNOWN, "", _WIDE)
    paint = f'class="jss-limit" fill="{svg.LIMIT}"' if trial.fits is False else svg.role_paint("temporaries")
    bar = svg.cell_bar(trial.peak / shown.most_peak, paint)
    return _figure(byte_text(trial.peak), bar, _WIDE)


def _step(shown: _Shown, trial: Trial) -> str:
    """The step time; a predicted one is hollow, and beside a measured one it is a tick."""
    comparison, most = shown.comparison, shown.most_seconds
    told, predicted = words.step_text(comparison, trial), trial.predicted
    if told == UNKNOWN or not most:
        return _figure(UNKNOWN, "", _WIDE)
    if words.is_predicted(comparison, trial):
        told += " <small>predicted</small>"
    seconds = comparison.seconds(trial)
    hollow = seconds is None or comparison.source == "predicted"
    tail = words.tail(comparison, trial)
    tick = None if tail is None else tail / most
    length = (predicted or 0.0) if seconds is None else seconds
    bar = svg.cell_bar(length / most, _INK, tick, hollow=hollow)
    return _figure(told, bar, _WIDE)


def _sent(shown: _Shown, name: str, size: int | None) -> str:
    if size is None:
        return _figure(UNKNOWN, "", _NARROW)
    first = name.split("+")[0]
    known = first in shown.mesh.axes
    paint = svg.fill(svg.axis_index(first, shown.mesh)) if known else _QUIET
    return _figure(shown.sent.text(size), svg.cell_bar(size / (shown.sent.most or 1), paint), _NARROW)


def _bubble(trial: Trial) -> str:
    if trial.bubble is None:
        return _figure(UNKNOWN, "", _NARROW)
    pipeline = None if trial.report is None else trial.report.pipeline
    hollow = pipeline is None or pipeline.bubble.measured is None
    bar = svg.cell_bar(trial.bubble, _QUIET, hollow=hollow)
    return _figure(words.percent_text(trial.bubble), bar, _NARROW)


def again(comparison: Comparison) -> str:
    """What runs each trial again, and what a reader of the chart asks of it."""
    shown = [trial for trial in data.in_order(comparison) if trial.report is not None]
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
        columns.append([told or UNKNOWN for told in predicted])
    if any(shares):
        head.append(("of the limit", "right"))
        columns.append([share or UNKNOWN for share in shares])
    head += [("on the Pareto front", "wrap"), ("run it again as", "wrap")]
    columns.append([unbroken(words.front_text(comparison, t)) for t in shown])
    columns.append([_typed(f"%%shard {t.line}") for t in shown])
    return section("Each trial", table(head, zip(*columns, strict=True)))
