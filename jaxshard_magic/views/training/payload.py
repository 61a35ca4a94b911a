"""Metrics of a run as data for widgets: complete and incremental updates of a run in progress, a report's metrics, and
several runs over each other."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from jaxshard_magic.report.metrics import Curve, CurveTail, Metrics
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.payload_encoding import compressed, span_pairs
from jaxshard_magic.views.training import data

VERSION = 1
DIGITS = 4  # significant digits of a value in a chart
MOST = 16  # curves sent to the widget, at most


def packed_training(update: Mapping[str, Any]) -> bytes:
    """Return a complete update as compact JSON, compressed with zlib at its fastest level."""
    return compressed(update, 1)


def update_payload(number: int, tails: Sequence[CurveTail], line: str, share: float | None) -> dict[str, Any]:
    """Return one update of a run in progress.

    Args:
        number: Number of the update.
        tails: New buckets of each curve; curves beyond `MOST` are dropped.
        line: Text of the progress line.
        share: Share of the run that is done; None if unknown.
    """
    return {
        "v": VERSION,
        "number": number,
        "line": printable(line),
        "share": share,
        "curves": [_curve(tail) for tail in tails[:MOST]],
    }


def bucket_counts(tails: Sequence[CurveTail]) -> dict[str, tuple[int, int]]:
    """Return (number of buckets, width of a bucket) of each curve, by name, for a widget that got these tails."""
    return {tail.curve.name: (tail.start + len(tail.curve), tail.width) for tail in tails[:MOST]}


def training_payload(metrics: Metrics) -> dict[str, Any]:
    """Return the data of the training view of a report."""
    return {
        "lead": span_pairs(data.summary_spans(metrics)),
        "charts": [_chart(curve, [curve]) for curve in data.charted_curves(metrics)],
        "heads": data.HEADS,
        "rows": [[printable(each) for each in row] for row in data.rows(metrics)],
        "notes": [printable(note) for note in data.notes(metrics)],
    }


def curves_payload(runs: Sequence[tuple[str, Metrics | None]]) -> dict[str, Any] | None:
    """Return the data of curves of several runs over each other; None if no two runs share a number.

    Args:
        runs: (name, metrics) of each run; None for a run without metrics.
    """
    shown, curves = data.shared_curves(runs)
    if not curves:
        return None
    return {
        "names": [printable(name) for name, _ in shown],
        "charts": [_chart(own[0][1], [c for _, c in own]) for own in curves],
    }


def _chart(about: Curve, curves: Sequence[Curve]) -> dict[str, Any]:
    return {
        "label": printable(data.label_of(about)),
        "unit": about.unit,
        "value": data.newest_text(about) if len(curves) == 1 else "",
        "curves": [{"buckets": _buckets(curve), "astray": curve.astray} for curve in curves],
    }


def _curve(tail: CurveTail) -> dict[str, Any]:
    curve = tail.curve
    return {
        "name": printable(curve.name),
        "label": printable(data.label_of(curve)),
        "unit": curve.unit,
        "value": data.newest_text(curve),
        "start": tail.start,
        "width": tail.width,
        "astray": curve.astray,
        "buckets": _buckets(curve),
    }


def _buckets(curve: Curve) -> list[list[float | None]]:
    """Return [step, least, mean, largest] of each bucket."""
    columns = zip(curve.step, curve.min, curve.mean, curve.max, strict=True)
    return [[step, *map(_short, values)] for step, *values in columns]


def _short(value: float | None) -> float | None:
    """Return a value with 4 significant digits; None if not finite."""
    # JSON has no NaN, and a chart does not show more digits.
    return None if value is None or not isfinite(value) else float(f"{value:.{DIGITS}g}")
