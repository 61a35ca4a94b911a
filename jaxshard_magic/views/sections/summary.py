"""First and last sections of a report: verdict, key figures, options, hints, predicted step, times and check."""

from dataclasses import dataclass

from jaxshard_magic.report import Alternative, Report
from jaxshard_magic.views import figure_marks, words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import byte_text, count_text, flops_text, seconds_text, share_text

TIME_PARTS = 12
BOTH = 80  # columns of a terminal from which a figure of an option stands beside its share
OPTION_HEADS = {
    "peak": "Bytes on the fullest device at its peak",
    "FLOPs": "Of matrix products and convolutions on one device, with those that are done again",
    "sent": "Bytes that one device sends in a step",
}
OPTIONS_TITLE = "Options, each compiled with and without"
AS_IT_IS = "as it is"


def head(report: Report) -> doc.Section:
    """Return the subject of a report, the verdict, and notes on the sources of the figures."""
    mesh, verdict = report.mesh, words.verdict(report)
    devices = (words.reported_devices(report, "x"), words.reported_devices(report))
    subject, typed = words.title_text(report), words.options_text(report)
    return doc.Section(
        "",
        (
            doc.Header(subject, typed, mesh.axes, devices, words.named_text(report)),
            doc.Paragraph(verdict.spans, None if verdict.ok else "error", leading=True),
            doc.Notes(tuple(words.notes(report)), below=False),
        ),
    )


def key_figures(report: Report) -> list[doc.Part]:
    """Return the key figures; nothing without a step."""
    figures = words.key_figures_of(report)
    return [doc.KeyFigures(figures, tuple(figure_marks.marks(report)))] if figures else []


def options(report: Report) -> list[doc.Part]:
    """Return the step with and without each option; nothing without options to compare."""
    compared = option_rows(report)
    if not compared:
        return []
    columns = [doc.Column("", least=1, from_end=True)]
    columns += [doc.Column(head, "right", more=5, more_alone=BOTH) for head in OPTION_HEADS]
    rows = (
        doc.TableRow(
            (doc.WordCell(doc.names(r.change)), *(doc.WordCell(v, s) for v, s in zip(r.values, r.shares, strict=True)))
        )
        for r in compared
    )
    refusals = tuple(doc.names(f"{r.change}: {r.reason}") for r in compared if r.reason)
    return [doc.Section(OPTIONS_TITLE, (doc.Table(tuple(columns), tuple(rows)), doc.Notes(refusals)))]


def hints(report: Report) -> list[doc.Part]:
    """Return the advice of a report."""
    told = tuple(doc.Hint(a.level, a.message, tuple((a.fix or "").splitlines())) for a in report.advice)
    return [doc.Hints(told, words.HINTS, "report.advice")] if told else []


def predicted_step(report: Report) -> list[doc.Part]:
    """Return the predicted step, divided into the device's own work and each kind of collective by axes."""
    parts = words.time_parts(report)
    total = sum(seconds for _, _, seconds in parts)
    if not total:
        return []
    rows = [
        doc.BreakdownPart(
            kind,
            axes or (),
            "" if kind in words.DEVICE_PARTS else words.axes_text(axes),
            words.time_part_text(report, kind, axes, seconds),
            share_text(seconds / total),
            seconds / total,
            kind in words.DEVICE_PARTS,
        )
        for kind, axes, seconds in parts[:TIME_PARTS]
    ]
    rest = parts[TIME_PARTS:]
    told = ", ".join(filter(None, (words.predicted_text(report), words.predicted_range(report))))
    left = seconds_text(sum(seconds for _, _, seconds in rest))
    return [doc.Breakdown("Predicted step", told, tuple(rows), len(rest), left)]


def timing(report: Report) -> list[doc.Part]:
    """Return the measured times of the calls, for forms other than a terminal's; nothing without a measurement."""
    known = report.timing
    if known is None or known.step_s is None:
        return []
    spread = known.step_s
    figures = {
        "least": seconds_text(spread.min),
        "median": seconds_text(spread.median),
        "most": seconds_text(spread.max),
        "timed calls": count_text(known.timed),
        "calls": count_text(known.calls),
    }
    if known.compile_s is not None:
        figures["compile"] = seconds_text(known.compile_s)
    title = "Timing on this CPU" if words.is_simulated(report) else f"Timing: {seconds_text(spread.median)} a step"
    columns = tuple(doc.Column(head, "right") for head in figures)
    row = doc.TableRow(tuple(doc.WordCell(figure) for figure in figures.values()))
    return [doc.Section(title, (doc.Table(columns, (row,)),), shows=doc.PAGES)]


def check(report: Report) -> list[doc.Part]:
    """Return whether the numbers are those of the plain step, with the leaves that differ; nothing without a check."""
    lines = words.check_lines(report)
    if not lines:
        return []
    passed = report.check is not None and report.check.passed
    title = "Check: the same numbers" if passed else "Check: not the same numbers"
    return [doc.Section(title, tuple(doc.Leaves(sentence, leaves) for sentence, leaves in lines), short="")]


@dataclass(frozen=True)
class OptionRow:
    """Figures of one variant of the step.

    Attributes:
        change: Changed option, as typed.
        values: Figures in the order of `OPTION_HEADS`.
        shares: Figures relative to the step as it is; empty texts for that step itself.
        reason: Reason for missing figures; None if they are known.
    """

    change: str
    values: tuple[str, ...]
    shares: tuple[str, ...]
    reason: str | None


def option_rows(report: Report) -> tuple[OptionRow, ...]:
    """Return the step as it is, then each change; empty for a report without options to compare."""
    if len(report.alternatives) < 2:
        return ()
    own = report.alternatives[0]
    return tuple(_option_row(a, own) for a in report.alternatives)


def _option_row(a: Alternative, own: Alternative) -> OptionRow:
    values = byte_text(a.peak), flops_text(a.flops), byte_text(a.sent)
    pairs = ((a.peak, own.peak), (a.flops, own.flops), (a.sent, own.sent))
    shares = ("",) * 3 if a is own else tuple(_share_of_own(x, y) for x, y in pairs)
    return OptionRow(a.change or AS_IT_IS, values, shares, a.why)


def _share_of_own(x: int | None, own: int | None) -> str:
    return "" if x is None or not own else share_text(x / own)
