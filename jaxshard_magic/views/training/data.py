"""Metrics of a run in the form that views show: selected curves, their labels, and figures as text."""

from collections.abc import Sequence
from math import isfinite

from jaxshard_magic.report.metrics import Curve, Metrics
from jaxshard_magic.views.format import (
    SPACE,
    byte_text,
    count_text,
    flops_text,
    number_text,
    seconds_text,
    share_text,
    significant,
    trimmed,
)
from jaxshard_magic.views.words.spans import Span, strong

RUNS = 4  # runs drawn over each other, at most
HEADS = ("", "first", "least", "most", "last")
LONG = 16  # letters of a name in a tab's label, at most
CHARTS = 6  # charts, at most; the table has all numbers
OF_LOOP = 3  # charts of the loop's numbers, at most

LABELS = {
    "step_s": "time a call",
    "examples_per_s": "examples",
    "tokens_per_s": "tokens",
    "flops_per_s": "achieved",
    "mfu": "MFU",
    "memory": "memory, fullest device",
    "busy": "devices at work",
}
_DRAWN = ("step_s", "tokens_per_s", "examples_per_s", "mfu", "flops_per_s", "memory", "busy")


def label_of(curve: Curve) -> str:
    """Return the label of a curve; numbers returned by the step keep their own names."""
    return curve.name if curve.source == "step" else LABELS.get(curve.name, curve.name)


def value_text(curve: Curve, value: float | None) -> str:
    """Return a value of a curve with its unit; `NaN` or `infinity` for such values, a dash for None.

    Args:
        curve: Gives the unit.
        value: Value.
    """
    if value is None or not isfinite(value):
        return number_text(value)
    match curve.unit:
        case "s":
            return seconds_text(value)
        case "bytes":
            return byte_text(value)
        case "share":
            return share_text(value)
        case "FLOP/s":
            number = flops_text(value)
            return f"{number}{'' if number[-1].isalpha() else SPACE}FLOP/s"
        case "examples/s" | "tokens/s":
            return f"{count_text(round(value)) if value >= 100 else significant(value)}{SPACE}/s"
    return number_text(value)


def newest_text(curve: Curve) -> str:
    """Return the newest value of a curve as text."""
    return value_text(curve, curve.last[-1] if len(curve) else None)


def least_of(curve: Curve) -> float | None:
    """Return the least finite value, None without one."""
    return min((value for value in curve.min if value is not None), default=None)


def most_of(curve: Curve) -> float | None:
    """Return the largest finite value, None without one."""
    return max((value for value in curve.max if value is not None), default=None)


def charted_curves(metrics: Metrics) -> list[Curve]:
    """Return the curves that get a chart: numbers of the step first, then the most telling ones of the loop.

    At most `CHARTS` curves are returned, at most `OF_LOOP` of them from the loop.
    """
    own = [curve for curve in metrics.curves if curve.source == "step"]
    by_name = {curve.name: curve for curve in metrics.curves if curve.source == "loop"}
    if "tokens_per_s" in by_name:
        by_name.pop("examples_per_s", None)  # its curve has the same shape
    loop = [by_name[name] for name in _DRAWN if name in by_name and len(by_name[name]) > 1][:OF_LOOP]
    return [*own[: CHARTS - len(loop)], *loop]


def main_of(metrics: Metrics) -> Curve | None:
    """Return the curve that stands for the run: the loss, else the only number of the step; None for several without a
    loss."""
    own = [curve for curve in metrics.curves if curve.source == "step"]
    loss = next((curve for curve in own if curve.name == (metrics.loss or "loss")), None)
    return loss if loss is not None or len(own) != 1 else own[0]


def summary_spans(metrics: Metrics) -> list[Span]:
    """Return one sentence on the run: `loss 0.0421 after 3,000 steps, from 2.31, in 36.2 s.`"""
    steps = f"{count_text(metrics.steps)} step{'s' * (metrics.steps != 1)}"
    main, spent = main_of(metrics), f" in {seconds_text(metrics.seconds)}."
    if main is None:
        return [strong(steps), Span(spent)]
    start = f", from {value_text(main, main.first)}" if main.count > 1 else ""
    return [strong(f"{main.name} {newest_text(main)}"), Span(f" after {steps}{start},{spent}")]


def short_text(metrics: Metrics) -> str:
    """Return the result in short: `loss 0.0421`, else the number of steps."""
    main = main_of(metrics)
    if main is None or len(main.name) > LONG:
        return f"{count_text(metrics.steps)} steps"
    return f"{main.name} {newest_text(main)}"


def summary_text(metrics: Metrics) -> str:
    """Return the sentence of `summary_spans` as plain text."""
    return "".join(span.text for span in summary_spans(metrics))


def notes(metrics: Metrics) -> list[str]:
    """Return notes on the numbers: first non-finite steps, the rule of rates, unread steps, and numbers that are not
    stored."""
    sentences = [
        f"{curve.name} is not finite from step {count_text(curve.astray)} on"
        + ("." if curve.before is None else f"; at step {count_text(curve.before)} it was.")
        for curve in metrics.curves
        if curve.astray is not None
    ]
    rules = [f"{label_of(curve)}: {curve.rule}" for curve in metrics.curves if curve.rule]
    sentences += [f"Counted by the batch; {'; '.join(rules)}."] if rules else []
    if metrics.skipped:
        read = metrics.steps - metrics.skipped
        sentences.append(
            f"Steps came faster than they are read: {count_text(read)} of {count_text(metrics.steps)} were."
        )
    if metrics.left_out:
        sentences.append(f"{count_text(metrics.left_out)} more numbers that the step returns are not kept.")
    return sentences


def rows(metrics: Metrics) -> list[tuple[str, str, str, str, str]]:
    """Return (label, first, least, largest, last) of each curve as text."""
    return [
        (
            label_of(curve),
            value_text(curve, curve.first),
            value_text(curve, least_of(curve)),
            value_text(curve, most_of(curve)),
            newest_text(curve),
        )
        for curve in metrics.curves
    ]


def shared_curves(
    runs: Sequence[tuple[str, Metrics | None]],
) -> tuple[list[tuple[str, Metrics]], list[list[tuple[str, Curve]]]]:
    """Select the curves to draw over each other.

    Args:
        runs: (name, metrics) of each run; None for a run without metrics.

    Returns:
        The runs to draw, at most `RUNS`; and for each number of at least two of them its curves as (name of the run,
        curve).
    """
    shown = [(name, metrics) for name, metrics in runs if metrics is not None][:RUNS]
    names = shared_names([metrics for _, metrics in shown])
    return shown, [[(run, c) for run, metrics in shown for c in metrics.curves if c.name == n] for n in names]


def shared_names(runs: Sequence[Metrics]) -> list[str]:
    """Return the names of numbers that at least two runs have and one draws, those of the steps first."""
    curves = sorted((c for run in runs for c in charted_curves(run)), key=lambda curve: curve.source != "step")
    names = dict.fromkeys(curve.name for curve in curves)
    return [name for name in names if sum(name in [c.name for c in run.curves] for run in runs) > 1]


def step_text(step: float) -> str:
    """Return a step number for an axis; from a million on in millions."""
    return count_text(round(step)) if step < 1e6 else trimmed(significant(step / 1e6)) + "M"
