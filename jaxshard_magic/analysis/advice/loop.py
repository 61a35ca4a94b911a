"""Advice on the loop around the step: what it waits for, what it compiles again, and numbers that went astray."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isinf
from statistics import median
from typing import TYPE_CHECKING

from ...places import place
from ...report import Advice, Metrics, Timing
from ...units import seconds_text as time
from ...units import share_text as share

if TYPE_CHECKING:
    from ...step.recompiled import Recompiled
    from .case import Case

WAITS = 0.2  # of the time from call to call that is none of the step's: more is worth a warning
SLOWER = 1.5  # times as long as at the beginning
PARTS = 8  # of a run, at least, before its first and its last quarter are compared
FEED = """\
import jaxshard_magic

# for batch in jaxshard_magic.feed(batches):"""
_MEND = {
    False: "If it reads its batches there, let a feed take them ahead while the step runs, where batches are what the "
    "loop goes through:",
    True: "Batches are taken ahead already: the loader itself is slower than the step, or the loop does more.",
}
LONG = 1.0  # seconds of compiling that are worth a warning


@dataclass(frozen=True)
class Loop:
    """The loop that called the step: its `metrics`, with `loss` the name of the loss among them, its `timing`, what it
    compiled again; `idle_at` the file and line where it was when no device worked, with how often it was seen there, of
    so many `idle` times in all."""

    timing: Timing | None = None
    metrics: Metrics | None = None
    loss: str | None = None
    recompiled: "Sequence[Recompiled]" = ()
    idle_at: tuple[str, int, int] | None = None
    idle: int = 0


def astray(case: "Case") -> Iterator[Advice]:
    """The loss is not a number, or infinite."""
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
    message = (
        f"{said} With this before the loop the step raises at the line that makes the first such number:"
    )
    yield Advice("loss-astray", "error", message, f'jax.config.update("{setting}", True)')


def recompiles(case: "Case") -> Iterator[Advice]:
    """The loop waited for the compiler after its first call."""
    found = case.loop.recompiled
    if not found:
        return
    last, seconds = found[-1], sum(each.seconds for each in found)
    where = f", at {place(last.file, last.line)}" if last.line is not None else ""
    if len(found) == 1:
        said = f"Call {last.call:,} compiled the step anew, {time(seconds)}{where}"
    else:
        said = f"{len(found)} calls compiled the step anew, {time(seconds)} together, last call {last.call:,}{where}"
    more = f" and {last.more} more" if last.more else ""
    mend, fix = "", None
    if last.rows is not None:
        rows, position = last.rows
        mend = " Drop what is left over of the data: with this before the loop, where batches are what it goes through."
        fix = f"batches = (b for b in batches if len(jax.tree.leaves(b)[{position}]) == {rows})"
    elif last.batch == {"shapes"}:
        mend = " Pad the batches to one shape: each is compiled for once."
    elif last.batch:
        same = " and ".join(kind for kind in ("entries", "dtypes", "shapes") if kind in last.batch)
        mend = f" Give all batches the same {same}: each kind of batch is compiled for once."
    level = "warning" if seconds >= LONG else "info"
    yield Advice("recompiled", level, f"{said}: {'; '.join(last.changes)}{more}.{mend}", fix)


def input_bound(case: "Case") -> Iterator[Advice]:
    """The devices wait for what the loop does between two steps."""
    timing = case.loop.timing
    if timing is None or timing.apart_s is None or timing.step_s is None:
        return
    between = timing.apart_s - timing.step_s.median
    if between < WAITS * timing.apart_s:
        return
    at = ""
    if case.loop.idle_at is not None:
        file, line, seen = case.loop.idle_at
        at = f" It was at {place(file, line)} at {seen} of {case.loop.idle} looks when no device worked."
    message = (
        f"The step waits for its loop {share(between / timing.apart_s)} of the time: {time(timing.apart_s)} pass from "
        f"call to call, and the step takes {time(timing.step_s.median)}.{at} {_MEND[timing.data_share is not None]}"
    )
    fix = FEED if timing.data_share is None else None
    yield Advice("input-bound", case.timed_level, message, fix)


def slower(case: "Case") -> Iterator[Advice]:
    """Steps take longer than they did."""
    metrics = case.loop.metrics
    curve = None if metrics is None else next((c for c in metrics.curves if c.name == "step_s"), None)
    means = [] if curve is None else [m for m in curve.mean if m is not None][1:]  # a warm-up is none of it
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
