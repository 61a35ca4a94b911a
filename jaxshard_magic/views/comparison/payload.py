"""Data of a comparison for its widget: each trial as numbers and texts, and details for a comparison of two."""

from collections.abc import Mapping
from typing import Any

from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.parts import finite_or_none
from jaxshard_magic.views.comparison import data
from jaxshard_magic.views.comparison.trial_details import trial_details
from jaxshard_magic.views.format import UNKNOWN, byte_text, limit_text, printable, seconds_text
from jaxshard_magic.views.payload_encoding import axis_numbers, compressed, span_pairs
from jaxshard_magic.views.training.payload import curves_payload
from jaxshard_magic.views.words import comparison as words
from jaxshard_magic.views.words import percent_text

VERSION = 1


def packed_comparison(comparison: Comparison) -> bytes:
    """Return the payload as compact JSON in UTF-8, compressed with zlib."""
    return compressed(payload(comparison))


def payload(comparison: Comparison) -> dict[str, Any]:
    """Return the data of the comparison's widget, ready for JSON. Names are plain text, never markup."""
    reports = filter(None, (trial.report for trial in comparison.trials))
    index, sent = axis_numbers(data.merged_mesh(comparison).axes, reports), data.sent_columns(comparison)
    limit = data.limit_of(comparison)
    names, front = words.trial_names(comparison), {id(trial) for trial in comparison.front}
    return {
        "v": VERSION,
        "lead": span_pairs(words.comparison_lead(comparison)),
        "about": printable(words.comparison_about(comparison)),
        "notes": [printable(note) for note in words.comparison_notes(comparison)],
        "axes": [printable(axis) for axis in index],
        "source": words.source_text(comparison),
        "limit": limit,
        "limit_text": None if limit is None else limit_text(limit),
        "sent": {
            "unit": sent.unit,
            "names": [printable(name) for name in sent.names],
            "axes": [_over(name, index) for name in sent.names],
        },
        "trials": [
            _trial(comparison, trial, names[trial.key], sent)
            | {"mesh": [[index[axis], size] for axis, size in trial.mesh.items()], "front": id(trial) in front}
            for trial in comparison.trials
        ],
        "left": [printable(line) for line in comparison.left],
        "pairs": trial_details(comparison, index),
        "curves": curves_payload(data.trial_metrics(comparison)),
    }


def default_trial(comparison: Comparison) -> int | None:
    """Return the position of the trial shown at first: the fastest, else the smallest; None if neither is known."""
    best = comparison.fastest or comparison.smallest
    return next((i for i, trial in enumerate(comparison.trials) if trial is best), None)


def _over(name: str, index: Mapping[str, int]) -> list[int] | None:
    """Return the indices of the axes of a column of bytes sent; None for unknown axes, and for merged columns."""
    axes = name.split("+")
    return [index[axis] for axis in axes] if all(axis in index for axis in axes) else None


def _trial(comparison: Comparison, trial: Trial, name: words.TrialName, sent: data.SentColumns) -> dict[str, Any]:
    """Return the data of one trial."""
    seconds, failed = finite_or_none(comparison.seconds(trial)), data.has_failed(trial)
    sizes, check = sent.bytes_of(trial), None if trial.report is None else trial.report.check
    return {
        "name": printable(name.strategy),
        "more": printable(name.options),
        "label": printable(name.text),
        "line": printable(trial.line),
        "failed": failed,
        "why": [printable(part) for part in words.failure_parts(trial)] if failed else None,
        "fix": None if trial.fix is None else printable(trial.fix),
        "fits": _answer(words.fits_answer(trial)),
        "over": trial.fits is False,
        "peak": trial.peak,
        "peak_text": byte_text(trial.peak),
        "seconds": seconds,
        "seconds_text": words.step_text(comparison, trial),
        "apart": words.is_predicted(comparison, trial),
        "tail": finite_or_none(words.comparable_prediction(comparison, trial)),
        "sent": sizes,
        "sent_text": [UNKNOWN if size is None else sent.text(size) for size in sizes],
        "bubble": finite_or_none(trial.bubble),
        "bubble_text": percent_text(trial.bubble),
        "same": _answer(words.same_answer(trial)),
        "differs": None if check is None else finite_or_none(words.largest_difference(check)),
        "point": not failed and seconds is not None and trial.peak is not None,
        "facts": [[term, printable(told)] for term, told in _facts(comparison, trial)],
    }


def _answer(answer: words.SignedAnswer) -> list[str | None]:
    return [answer.sign, answer.word, answer.more]


def _facts(comparison: Comparison, trial: Trial) -> list[tuple[str, str]]:
    """Return (term, text) pairs for the chosen trial beside the picture."""
    told = [("report", number)] if (number := words.report_text(trial)) else []
    if trial.measured is not None:
        beside = words.prediction_text(comparison, trial)
        how = f", predicted {beside}" if beside else ""
        told.append(("this CPU took" if trial.simulated else "measured", f"{seconds_text(trial.measured)}{how}"))
    if trial.predicted is not None and words.comparable_prediction(comparison, trial) is None:
        on = trial.report.timing.on if trial.report and trial.report.timing else None
        told.append(("predicted", f"{seconds_text(trial.predicted)}{f' for {on}' if on else ''}"))
    if trial.peak is not None:
        share = words.limit_share(trial)
        told.append(("peak", f"{byte_text(trial.peak)}{f', {share} of the limit' if share else ''}"))
    return [*told, ("front", words.front_text(comparison, trial))]
