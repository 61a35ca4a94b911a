"""First and last sections of a report: verdict, key figures, options, hints, predicted step, times and check."""

from jaxshard_magic.report import Report
from jaxshard_magic.views import figure_marks, option_table, words
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import count_text, seconds_text, share_text

TIME_PARTS = 12
BOTH = 80  # columns of a terminal from which a figure of an option stands beside its share


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
    compared = option_table.rows(report)
    if not compared:
        return []
    columns = [doc.Column("", least=1, from_end=True)]
    columns += [doc.Column(head, "right", more=5, more_alone=BOTH) for head in option_table.HEADS]
    rows = (
        doc.TableRow(
            (doc.WordCell(doc.names(r.change)), *(doc.WordCell(v, s) for v, s in zip(r.values, r.shares, strict=True)))
        )
        for r in compared
    )
    refusals = tuple(doc.names(f"{r.change}: {r.reason}") for r in compared if r.reason)
    return [doc.Section(option_table.TITLE, (doc.Table(tuple(columns), tuple(rows)), doc.Notes(refusals)))]


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
