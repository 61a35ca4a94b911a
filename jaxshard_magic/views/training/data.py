"""What is shown of a run's metrics: which curves, what they are called, and their figures in words."""

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

RUNS = 4  # that are drawn over each other
HEADS = ("", "first", "least", "most", "last")
LONG = 16  # letters of a name in a tab
CHARTS = 6  # that are drawn; every number is in the table
OF_LOOP = 3  # of them at most of the loop

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
    """What a curve is called: a number of the step by its own name."""
    return curve.name if curve.source == "step" else LABELS.get(curve.name, curve.name)


def value_text(curve: Curve, value: float | None) -> str:
    """A value of a curve with its unit; `NaN` and `infinity` are told, and a dash stands for None."""
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
    """The newest value of a curve: what a chart of it says, while it grows and in a report."""
    return value_text(curve, curve.last[-1] if len(curve) else None)


def least_of(curve: Curve) -> float | None:
    """The least finite value."""
    return min((value for value in curve.min if value is not None), default=None)


def most_of(curve: Curve) -> float | None:
    """The largest finite value."""
    return max((value for value in curve.max if value is not None), default=None)


def drawn(metrics: Metrics) -> list[Curve]:
    """The curves that have a chart: those of the step first, then those of its loop that tell most."""
    own = [curve for curve in metrics.curves if curve.source == "step"]
    by_name = {curve.name: curve for curve in metrics.curves if curve.source == "loop"}
    if "tokens_per_s" in by_name:
        by_name.pop("examples_per_s", None)  # of the same shape
    loop = [by_name[name] for name in _DRAWN if name in by_name and len(by_name[name]) > 1][:OF_LOOP]
    return [*own[: CHARTS - len(loop)], *loop]


def main_of(metrics: Metrics) -> Curve | None:
    """The curve to speak of: the step's loss, else its only number; None where it returns several and no loss."""
    own = [curve for curve in metrics.curves if curve.source == "step"]
    loss = next((curve for curve in own if curve.name == (metrics.loss or "loss")), None)
    return loss if loss is not None or len(own) != 1 else own[0]


def lead(metrics: Metrics) -> list[Span]:
    """`loss 0.0421 after 3,000 steps, from 2.31, in 36.2 s.`"""
    steps = f"{count_text(metrics.steps)} step{'s' * (metrics.steps != 1)}"
    main, spent = main_of(metrics), f" in {seconds_text(metrics.seconds)}."
    if main is None:
        return [strong(steps), Span(spent)]
    start = f", from {value_text(main, main.first)}" if main.count > 1 else ""
    return [strong(f"{main.name} {newest_text(main)}"), Span(f" after {steps}{start},{spent}")]


def short_text(metrics: Metrics) -> str:
    """What it came to, in a word: `loss 0.0421`, else its steps."""
    main = main_of(metrics)
    if main is None or len(main.name) > LONG:
        return f"{count_text(metrics.steps)} steps"
    return f"{main.name} {newest_text(main)}"


def lead_text(metrics: Metrics) -> str:
    """The same as plain text."""
    return "".join(span.text for span in lead(metrics))


def notes(metrics: Metrics) -> list[str]:
    """What a reader must know of the numbers: by what rates are counted, what went unread, and what went astray."""
    told = [
        f"{curve.name} is not finite from step {count_text(curve.astray)} on"
        + ("." if curve.before is None else f"; at step {count_text(curve.before)} it was.")
        for curve in metrics.curves
        if curve.astray is not None
    ]
    rules = [f"{label_of(curve)}: {curve.rule}" for curve in metrics.curves if curve.rule]
    told += [f"Counted by the batch; {'; '.join(rules)}."] if rules else []
    if metrics.skipped:
        read = metrics.steps - metrics.skipped
        told.append(
            f"Steps came faster than they are read: {count_text(read)} of {count_text(metrics.steps)} were."
        )
    if metrics.left_out:
        told.append(f"{count_text(metrics.left_out)} more numbers that the step returns are not kept.")
    return told


def rows(metrics: Metrics) -> list[tuple[str, str, str, str, str]]:
    """Of each curve its label, and its first, least, largest and last value, as text."""
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


def over_each_other(
    runs: Sequence[tuple[str, Metrics | None]],
) -> tuple[list[tuple[str, Metrics]], list[list[tuple[str, Curve]]]]:
    """The runs that are drawn, of those that have metrics, with their names; and for each number that two of these have
    its curves, each with the name of its run."""
    shown = [(name, metrics) for name, metrics in runs if metrics is not None][:RUNS]
    names = shared_names([metrics for _, metrics in shown])
    return shown, [[(run, c) for run, metrics in shown for c in metrics.curves if c.name == n] for n in names]


def shared_names(runs: Sequence[Metrics]) -> list[str]:
    """The numbers that are drawn of at least two runs, those of the steps first."""
    curves = sorted((c for run in runs for c in drawn(run)), key=lambda curve: curve.source != "step")
    names = dict.fromkeys(curve.name for curve in curves)
    return [name for name in names if sum(name in [c.name for c in run.curves] for run in runs) > 1]


def step_text(step: float) -> str:
    """A step on an axis."""
    return count_text(round(step)) if step < 1e6 else trimmed(significant(step / 1e6)) + "M"
