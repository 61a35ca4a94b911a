"""What each option of a step's gradients changes: the programs with and without it, as compiled."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..config.options import REDUCE, GradientOptions
from ..errors import ShardError
from ..program.mapped import PerDevice
from ..report import Alternative
from .reading import reading_of

if TYPE_CHECKING:
    from ..step import ShardedStep
    from ..step.entry import Entry


def alternatives(step: "ShardedStep", limit_s: float) -> tuple[Alternative, ...]:
    """The step as it is, then without each of its options, then with the other ways to reduce its gradients.

    Empty for a step without such options. Programs are compiled and not run; none where they would take more than
    `limit_s` seconds together, by the time that the step's own took, and none after an interrupt.
    """
    entry = step.entry
    fixed = step.request.pipeline is not None or (entry is not None and isinstance(entry.traced, PerDevice))
    changes = [
        (change, inside)
        for change, inside in _changes(step.request.gradients, fixed)
        if step.request.pipeline is None or inside.microbatches == step.request.gradients.microbatches
    ]
    if entry is None or entry.compile_s is None or not changes:
        return ()
    tried = [_of(entry, "")]
    needed = entry.compile_s * len(changes)
    why = None
    if needed > limit_s:
        why = f"not compiled: all of these would take about {needed:.0f} s, and the limit is {limit_s:.0f} s"
    for change, inside in changes:
        if why is not None:
            tried.append(Alternative(change, why=why))
            continue
        try:
            tried.append(_of(step.otherwise(inside), change))
        except ShardError as error:
            tried.append(Alternative(change, why=str(error)))
        except KeyboardInterrupt:
            why = "not compiled: interrupted"
            tried.append(Alternative(change, why=why))
    return tuple(tried)


def _changes(inside: GradientOptions, fixed: bool) -> Iterator[tuple[str, GradientOptions]]:
    """`fixed`: does the step itself say, or its pipeline, when its gradients are reduced?"""
    for name, value in inside.given.items():
        if name != "reduce":
            yield (
                f"without --{name.replace('_', '-')}" + (f" {value}" if value is not True else ""),
                replace(inside, **{name: getattr(GradientOptions, name)}),
            )
    if not fixed and (inside.microbatches > 1 or inside.reduce != "each"):
        for how in REDUCE:
            if how != inside.reduce:
                yield f"--reduce {how}", replace(inside, reduce=how)


def _of(entry: "Entry", change: str) -> Alternative:
    reading, shares = reading_of(entry), entry.plan.shares
    devices = reading.memory.per_device if reading.memory is not None else ()
    peaks = [d.peak for d in devices if d.peak is not None]
    rows = reading.collectives
    return Alternative(
        change,
        peak=max(peaks, default=None),
        flops=None if shares is None else sum(share.flops for share in shares),
        sent=None if rows is None else sum(c.wire_bytes for c in rows),
    )
