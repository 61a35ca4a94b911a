"""Comparison of strategies for a terminal: answers, a row for each trial, and the line that runs each trial again."""

from collections.abc import Sequence

from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.parts import mesh_text
from jaxshard_magic.views import words
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.format import UNKNOWN, byte_text, limit_text, more_text, printable, seconds_text
from jaxshard_magic.views.option_table import flops_text
from jaxshard_magic.views.terminal import clip, display_width, plain_signs, table, terminal_text, text_width, wrap_all
from jaxshard_magic.views.training import text as training

LEFT_ROWS = 12
_FRONT = "* on the Pareto front: no trial is both faster and smaller"
_SEVERAL = "What goes over several axes at once, less than 0.1% of what a trial sends, is left out."


def to_text(comparison: Comparison, width: int | None = None) -> str:
    """Render the comparison as lines for a terminal. A line to paste is never broken.

    Args:
        comparison: Comparison to show.
        width: Columns, clamped to 60 to 100; None takes the width of the terminal.
    """
    room = text_width(width)
    lead = "".join(span.text for span in words.comparison_lead(comparison))
    limit = data.limit_of(comparison)
    about = words.comparison_about(comparison) + (f" Memory limit {limit_text(limit)}." if limit else "")
    notes = [*words.comparison_notes(comparison), *omissions(comparison)]
    parts = [
        wrap_all((lead, about), room),
        *figures(comparison, room),
        failures(comparison, room),
        training.curves(data.trial_metrics(comparison), room),
        _again(comparison),
        wrap_all(notes, room),
    ]
    return "\n\n".join(terminal_text(part) for part in parts if part)


def omissions(comparison: Comparison) -> list[str]:
    """Return sentences on bytes and candidates that the table omits."""
    left = [_SEVERAL] if data.sent_columns(comparison).has_omitted else []
    if comparison.left:
        names = "; ".join(comparison.left[:LEFT_ROWS])
        more = more_text(len(comparison.left), LEFT_ROWS)
        left.append(f"Not tried: {names}{more}.")
    return left


def figures(comparison: Comparison, room: int) -> list[list[str]]:
    """Return the tables of the trials that ran: one wide table, or as many below each other as the width requires.

    Args:
        comparison: Comparison to show.
        room: Columns of the terminal.
    """
    shown = [trial for trial in data.sorted_trials(comparison) if not data.has_failed(trial)]
    if not shown:
        return []
    names, front = words.trial_names(comparison), {trial.key for trial in comparison.front}
    marked = [f"{'*' if t.key in front else ' '} {names[t.key].text}" for t in shown]
    first = {"  strategy": [clip(printable(name), room // 2) for name in marked]}
    groups = [_answers(comparison, shown), _amounts(comparison, shown, room // 2 - 2)]
    whole = first | groups[0] | groups[1]
    if _width(whole) <= room:
        lines = [_table(whole)]
    elif all(_width(first | group) <= room for group in groups):
        lines = [_table(first | group) for group in groups]
    else:
        lines, now = [], first
        for head, column in (groups[0] | groups[1]).items():
            if _width(now | {head: column}) > room and now is not first:
                lines.append(_table(now))
                now = first
            now = now | {head: column}
        lines.append(_table(now))
    if front:
        lines[-1].append(_FRONT)
    return lines


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table."""
    lefts = [head for head in columns if head.startswith(("  strategy", "mesh", "sent", "numbers"))]
    return table(columns, lefts, "")


def _width(columns: dict[str, list[str]]) -> int:
    return display_width(_table(columns)[0])


def _answers(comparison: Comparison, shown: Sequence[Trial]) -> dict[str, list[str]]:
    """Return the columns on memory, speed and equality of numbers."""
    measured = comparison.source == "measured"
    predicted = [words.predicted_text(t.report) if t.report else UNKNOWN for t in shown]
    columns = {
        "fits": [words.fits_answer(t).text for t in shown],
        "peak": [byte_text(t.peak) for t in shown],
        "step": [seconds_text(comparison.seconds(t)) for t in shown],
        "predicted": predicted,
        "numbers": [words.same_answer(t).text for t in shown],
    }
    known = {"step": measured, "predicted": any(told != UNKNOWN for told in predicted)}
    return {head: list(map(plain_signs, told)) for head, told in columns.items() if known.get(head, True)}


def _amounts(comparison: Comparison, shown: Sequence[Trial], most: int) -> dict[str, list[str]]:
    """Return the columns on mesh, bytes sent, bubble and FLOPs.

    Args:
        comparison: Comparison to show.
        shown: Trials with figures.
        most: Maximal width of the columns that can be long.
    """
    sent, bubbles = data.sent_columns(comparison), [words.percent_text(t.bubble) for t in shown]
    columns = {
        "mesh": [clip(printable(mesh_text(t.mesh)), most) for t in shown],
        f"sent, {sent.unit}": [clip(_sent(sent, t), most) for t in shown],
        "bubble": bubbles,
        "FLOPs": [flops_text(data.flops_of(t)) for t in shown],
        "report": (numbers := [words.report_text(t) for t in shown]),
    }
    known = {"bubble": any(told != UNKNOWN for told in bubbles), "report": any(numbers)}
    return {head: list(map(plain_signs, told)) for head, told in columns.items() if known.get(head, True)}


def _sent(sent: data.SentColumns, trial: Trial) -> str:
    """Return the bytes sent over each axis: `data 473 model 288`."""
    if trial.sent is None:
        return UNKNOWN
    over = zip(sent.names, sent.bytes_of(trial), strict=True)
    told = (f"{printable(data.column_title(name))} {sent.text(size)}" for name, size in over if size is not None)
    return " ".join(told) or "nothing"


def failures(comparison: Comparison, room: int) -> list[str]:
    """Return the failed trials, each with its reason and a fix on a line to paste.

    Args:
        comparison: Comparison to show.
        room: Columns of the terminal; lines to paste may be longer.
    """
    names, lines = words.trial_names(comparison), list[str]()
    for trial in data.sorted_trials(comparison):
        if data.has_failed(trial):
            mesh = "" if names[trial.key].mesh else f" ({mesh_text(trial.mesh)})"
            failure = f"{names[trial.key].text}{mesh}: {trial.why or 'no report'}"
            failure = f"{failure.rstrip('.')}. Fix:" if trial.fix else failure
            lines += wrap_all([failure], room, "x ", "  ")
            # Not wrapped: a broken line could not be pasted.
            lines += ["    " + printable(line) for line in (trial.fix or "").splitlines()]
    return lines


def _again(comparison: Comparison) -> list[str]:
    lines = ["    " + printable(f"%%shard {t.line}") for t in data.sorted_trials(comparison) if t.report is not None]
    return ["Run one again as", *lines] if lines else []
