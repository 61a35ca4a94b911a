"""A run's metrics as widgets read them: while it trains, all of it and what is new since; in a report, and of several
reports over each other."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from jaxshard_magic.report.metrics import Curve, Metrics, Tail
from jaxshard_magic.views.format import printable
from jaxshard_magic.views.packing import compressed, span_pairs
from jaxshard_magic.views.training import data

VERSION = 1
DIGITS = 4  # of a value in a chart
MOST = 16  # curves that the widget is told of


def packed_training(update: Mapping[str, Any]) -> bytes:
    """An update of all there is as compact JSON, compressed with zlib."""
    return compressed(update, 1)


def update(number: int, tails: Sequence[Tail], line: str, share: float | None) -> dict[str, Any]:
    """Update `number` of a training: what its line says, the share of it that is done, None where that is not known,
    and of each curve what is new."""
    return {
        "v": VERSION,
        "number": number,
        "line": printable(line),
        "share": share,
        "curves": [_curve(tail) for tail in tails[:MOST]],
    }


def held(tails: Sequence[Tail]) -> dict[str, tuple[int, int]]:
    """Of each curve how many buckets, and of which width, somebody has who was told these."""
    return {tail.curve.name: (tail.start + len(tail.curve), tail.width) for tail in tails[:MOST]}


def training_payload(metrics: Metrics) -> dict[str, Any]:
    """What the report's view of a training shows."""
    return {
        "lead": span_pairs(data.lead(metrics)),
        "charts": [_chart(curve, [curve]) for curve in data.drawn(metrics)],
        "heads": data.HEADS,
        "rows": [[printable(each) for each in row] for row in data.rows(metrics)],
        "notes": [printable(note) for note in data.notes(metrics)],
    }


def curves_payload(runs: Sequence[tuple[str, Metrics | None]]) -> dict[str, Any] | None:
    """The curves of several runs over each other, with the names of those that are drawn; None where no two have one in
    common."""
    shown, curves = data.over_each_other(runs)
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


def _curve(tail: Tail) -> dict[str, Any]:
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
    """Step, least, mean and largest value of each."""
    columns = zip(curve.step, curve.min, curve.mean, curve.max, strict=True)
    return [[step, *map(_short, values)] for step, *values in columns]


def _short(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.{DIGITS}g}")
