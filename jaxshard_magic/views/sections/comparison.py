"""Comparison of strategies as parts of a document: answers, a row for each trial, and the line that runs each again."""

from jaxshard_magic.report.comparison import Comparison
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.document import parts as doc
from jaxshard_magic.views.format import UNKNOWN, byte_text, flops_text, limit_text, more_text, seconds_text
from jaxshard_magic.views.training import data as training

LEFT = 12
LEAST_CURVE, MOST_CURVE = 8, 32  # columns in a terminal
_FRONT = "* on the Pareto front: no trial is both faster and smaller"
_SEVERAL = "What goes over several axes at once, less than 0.1% of what a trial sends, is left out."


def comparison(compared: Comparison) -> list[doc.Part]:
    """Return what a comparison says."""
    limit = data.limit_of(compared)
    about = words.comparison_about(compared) + (f" Memory limit {limit_text(limit)}." if limit else "")
    lines = tuple(f"%%shard {t.line}" for t in data.sorted_trials(compared) if t.report is not None)
    return [
        doc.Section("", (doc.Paragraph(words.comparison_lead(compared), leading=True), doc.Paragraph(about))),
        *trials(compared),
        *failures(compared),
        *curves(compared),
        *([doc.Commands("Run one again as", lines)] if lines else []),
        doc.Notes((*words.comparison_notes(compared), *omissions(compared)), below=False),
    ]


def omissions(compared: Comparison) -> list[str]:
    """Return sentences on bytes and candidates that the table omits."""
    left = [_SEVERAL] if data.sent_columns(compared).has_omitted else []
    if compared.left:
        listed = "; ".join(compared.left[:LEFT])
        left.append(f"Not tried: {listed}{more_text(len(compared.left), LEFT)}.")
    return left


def trials(compared: Comparison) -> list[doc.Part]:
    """Return the table of the trials that ran; nothing if there are none."""
    shown = [trial for trial in data.sorted_trials(compared) if not data.has_failed(trial)]
    if not shown:
        return []
    trial_names, front = words.trial_names(compared), {trial.key for trial in compared.front}
    sent = data.sent_columns(compared)
    # In a narrow terminal the answers on memory, speed and numbers have a table of their own.
    columns = {
        doc.Column("strategy", most=1 / 2, from_end=True): [doc.names(trial_names[t.key].text) for t in shown],
        doc.Column("fits", "right"): [words.fits_answer(t).text for t in shown],
        doc.Column("peak", "right"): [byte_text(t.peak) for t in shown],
        doc.Column("step", "right"): [seconds_text(compared.seconds(t)) for t in shown],
        doc.Column("predicted", "right"): [words.predicted_text(t.report) if t.report else UNKNOWN for t in shown],
        doc.Column("numbers"): [words.same_answer(t).text for t in shown],
        doc.Column("mesh", most=1 / 2, from_end=True): [doc.names(mesh_text(t.mesh)) for t in shown],
        doc.Column(f"sent, {sent.unit}", most=1 / 2, from_end=True): [sent.all_text(t) for t in shown],
        doc.Column("bubble", "right"): [words.percent_text(t.bubble) for t in shown],
        doc.Column("FLOPs", "right"): [flops_text(data.flops_of(t)) for t in shown],
        doc.Column("report", "right"): [words.report_text(t) for t in shown],
    }
    optional = {
        "step": compared.source == "measured",
        **{c.head: any(t != UNKNOWN for t in told) for c, told in columns.items() if c.head in ("predicted", "bubble")},
        "report": any(words.report_text(t) for t in shown),
    }
    known = {column: told for column, told in columns.items() if optional.get(column.head, True)}
    rows = (
        doc.TableRow(tuple(map(doc.WordCell, cells)), front=trial.key in front)
        for trial, cells in zip(shown, zip(*known.values(), strict=True), strict=True)
    )
    amounts = next(i for i, column in enumerate(known) if column.head == "mesh")
    notes = doc.Notes((_FRONT,) if front else (), below=False)
    return [doc.Section("", (doc.Table(tuple(known), tuple(rows), second=amounts), notes))]


def failures(compared: Comparison) -> list[doc.Part]:
    """Return the failed trials, each with its reason and a fix to paste."""
    trial_names, hints = words.trial_names(compared), []
    for trial in data.sorted_trials(compared):
        if data.has_failed(trial):
            name = trial_names[trial.key]
            mesh = "" if name.mesh else f" ({mesh_text(trial.mesh)})"
            failure = f"{name.text}{mesh}: {trial.why or 'no report'}"
            fix = tuple((trial.fix or "").splitlines())
            hints.append(doc.Hint("error", f"{failure.rstrip('.')}." if fix else failure, fix))
    return [doc.Hints(tuple(hints), len(hints), "trials")] if hints else []


def curves(compared: Comparison) -> list[doc.Part]:
    """Return the curves of the trials below each other on one scale, for each number of at least two of them."""
    tables = []
    for own in training.shared_curves(data.trial_metrics(compared))[1]:
        every = tuple(curve for _, curve in own)
        columns = (
            doc.Column(training.label_of(every[0]), most=1 / 3, from_end=True),
            doc.Column("first", "right"),
            doc.Column("last", "right"),
            doc.Column("over the steps", least=LEAST_CURVE, most=MOST_CURVE, shows=doc.EVERYWHERE),
        )
        rows = (
            doc.TableRow(
                (
                    doc.WordCell(doc.names(run)),
                    doc.WordCell(training.value_text(curve, curve.first)),
                    doc.WordCell(training.newest_text(curve)),
                    doc.CurveCell(curve, every),
                )
            )
            for run, curve in own
        )
        tables.append(doc.Table(columns, tuple(rows)))
    return [doc.Section("Curves", tuple(tables))] if tables else []
