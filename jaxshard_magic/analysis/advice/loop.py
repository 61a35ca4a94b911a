"""Advice on the loop around the step: idle devices, recompilation, and losses that are not finite."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from statistics import median
from typing import TYPE_CHECKING

from ...code_locations import location_text
from ...compilation.recompilation import Recompilation
from ...report import Advice, Metrics, Timing
from ...units import seconds_text as time
from ...units import share_text as share

if TYPE_CHECKING:
    from .case import Case

WAITS = 0.2  # share of the time from call to call spent outside of the step; more is a warning
SLOWER = 1.5  # ratio of the last step times to the first
PARTS = 8  # buckets of a curve; with fewer, the first and the last quarter are not compared
FEED = """\
import jaxshard_magic

# for batch in jaxshard_magic.feed(batches):"""
_MEND = {
    False: "If it reads its batches there, let a feed take them ahead while the step runs, where batches are what the "
    "loop goes through:",
    True: "Batches are taken ahead already: the loader itself is slower than the step, or the loop does more.",
}
LONG = 1.0  # seconds of compiling; more is a warning


@dataclass(frozen=True)
class TrainingLoop:
    """Facts about the loop that calls the step.

    Attributes:
        timing: Times of the step.
        metrics: Metrics of the loop.
        loss: Name of the loss among the metrics.
        recompiled: Calls that compiled the step again.
        idle_at: Most frequent file and line of the loop while no device worked, and the number of such samples.
        idle: Number of all samples without a working device.
    """

    timing: Timing | None = None
    metrics: Metrics | None = None
    loss: str | None = None
    recompiled: Sequence[Recompilation] = ()
    idle_at: tuple[str, int, int] | None = None
    idle: int = 0


def loss_not_finite(case: "Case") -> Iterator[Advice]:
    """Advise on a loss that is not finite."""
    metrics, loss = case.loop.metrics, case.loop.loss
    curve = None if metrics is None else next((c for c in metrics.curves if c.name == loss), None)
    if curve is None or curve.astray is None:
        return
    infinite = isinf(curve.last[-1])
    what = "infinite" if infinite else "not finite"
    if curve.before is None:
        said = f"The loss is {what} from the first step on."
    else:
        said = f"The loss is {what} from step {curve.astray:,} on; at step {curve.before:,} it was finite."
    setting = "jax_debug_infs" if infinite else "jax_debug_nans"
    message = f"{said} With this before the loop the step raises at the line that makes the first such number:"
    yield Advice("loss-astray", "error", message, f'jax.config.update("{setting}", True)')


def recompiles(case: "Case") -> Iterator[Advice]:
    """Advise on compilation after the first call."""
    recompiled = case.loop.recompiled
    if not recompiled:
        return
    last, seconds = recompiled[-1], sum(each.seconds for each in recompiled)
    where = f", at {location_text(last.file, last.line)}" if last.line is not None else ""
    if len(recompiled) == 1:
        summary = f"Call {last.call:,} compiled the step anew, {time(seconds)}{where}"
    else:
        summary = (
            f"{len(recompiled)} calls compiled the step anew, {time(seconds)} together, last call {last.call:,}{where}"
        )
    more = f" and {last.omitted} more" if last.omitted else ""
    remedy, fix = "", None
    if last.full_batch is not None:
        rows, position = last.full_batch
        remedy = (
            " Drop what is left over of the data: with this before the loop, where batches are what it goes through."
        )
        fix = f"batches = (b for b in batches if len(jax.tree.leaves(b)[{position}]) == {rows})"
    elif last.batch_changes == {"shapes"}:
        remedy = " Pad the batches to one shape: each is compiled for once."
    elif last.batch_changes:
        same = " and ".join(kind for kind in ("entries", "dtypes", "shapes") if kind in last.batch_changes)
        remedy = f" Give all batches the same {same}: each kind of batch is compiled for once."
    level = "warning" if seconds >= LONG else "info"
    yield Advice("recompiled", level, f"{summary}: {'; '.join(last.changes)}{more}.{remedy}", fix)


def input_bound(case: "Case") -> Iterator[Advice]:
    """Advise on devices waiting for the loop between two steps."""
    timing = case.loop.timing
    if timing is None or timing.apart_s is None or timing.step_s is None:
        return
    between = timing.apart_s - timing.step_s.median
    if between < WAITS * timing.apart_s:
        return
    at = ""
    if case.loop.idle_at is not None:
        file, line, seen = case.loop.idle_at
        at = f" It was at {location_text(file, line)} at {seen} of {case.loop.idle} looks when no device worked."
    message = (
        f"The step waits for its loop {share(between / timing.apart_s)} of the time: {time(timing.apart_s)} pass from "
        f"call to call, and the step takes {time(timing.step_s.median)}.{at} {_MEND[timing.data_share is not None]}"
    )
    fix = FEED if timing.data_share is None else None
    yield Advice("input-bound", case.timed_level, message, fix)


def slower(case: "Case") -> Iterator[Advice]:
    """Advise on steps that become slower."""
    metrics = case.loop.metrics
    curve = None if metrics is None else next((c for c in metrics.curves if c.name == "step_s"), None)
    # The first bucket contains the warm-up.
    means = [] if curve is None else [m for m in curve.mean if m is not None][1:]
    if curve is None or len(means) < PARTS:
        return
    first, last = median(means[: len(means) // 4]), median(means[-(len(means) // 4) :])
    if last < SLOWER * first:
        return
    quarter = curve.step[1 + len(means) // 4]
    message = (
        f"Steps got slower: {time(first)} up to step {quarter:,}, {time(last)} at the end. A list that grows in the "
        "loop, a device that is hot, or other work on this machine does that; report.metrics has when."
    )
    yield Advice("slower", case.timed_level, message, None)
