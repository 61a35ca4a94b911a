"""Compile a step with and without each of its gradient options, and compare memory, FLOPs and bytes sent."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..analysis.program_reading import program_reading
from ..compilation.compiled_step import CompiledStep
from ..config.options import REDUCE, GradientOptions
from ..errors import ShardError
from ..program.per_device import PerDeviceTrace
from ..report import Alternative

if TYPE_CHECKING:
    from .sharded_step import ShardedStep


def compile_alternatives(step: "ShardedStep", limit_s: float) -> tuple[Alternative, ...]:
    """Return the step as compiled, then without each of its options, then with each other way to reduce gradients.

    Programs are compiled and not run.

    Args:
        step: Step with one compiled program.
        limit_s: Time limit in seconds for all compilations; the estimate is the compile time of the step's own program,
            multiplied by the number of changes. Over the limit nothing is compiled.

    Returns:
        One entry for each change, with a reason in place of figures if the change was refused or not compiled. Nothing
        more is compiled after an interrupt. Empty for a step without gradient options.
    """
    entry = step.entry
    fixed = step.request.pipeline is not None or (entry is not None and isinstance(entry.traced, PerDeviceTrace))
    changes = [
        (change, inside)
        for change, inside in _changes(step.request.gradients, fixed)
        # The schedule of a pipeline was made for its number of microbatches.
        if step.request.pipeline is None or inside.microbatches == step.request.gradients.microbatches
    ]
    if entry is None or entry.compile_s is None or not changes:
        return ()
    results = [_measure_program(entry, "")]
    needed = entry.compile_s * len(changes)
    skip_reason = None
    if needed > limit_s:
        skip_reason = f"not compiled: all of these would take about {needed:.0f} s, and the limit is {limit_s:.0f} s"
    for change, inside in changes:
        if skip_reason is not None:
            results.append(Alternative(change, why=skip_reason))
            continue
        try:
            results.append(_measure_program(step.programs.otherwise(inside), change))
        except ShardError as error:
            results.append(Alternative(change, why=str(error)))
        except KeyboardInterrupt:
            skip_reason = "not compiled: interrupted"
            results.append(Alternative(change, why=skip_reason))
    return tuple(results)


def _changes(inside: GradientOptions, fixed: bool) -> Iterator[tuple[str, GradientOptions]]:
    """Yield each change of the options as text, with the changed options.

    Args:
        inside: Gradient options of the step.
        fixed: True if the step itself, or a pipeline, decides when gradients are reduced.
    """
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


def _measure_program(entry: CompiledStep, change: str) -> Alternative:
    """Return peak bytes, FLOPs and bytes sent of one compiled program, as a row of the comparison."""
    reading, shares = program_reading(entry), entry.plan.shares
    devices = reading.memory.per_device if reading.memory is not None else ()
    peaks = [d.peak for d in devices if d.peak is not None]
    rows = reading.collectives
    return Alternative(
        change,
        peak=max(peaks, default=None),
        flops=None if shares is None else sum(share.flops for share in shares),
        sent=None if rows is None else sum(c.wire_bytes for c in rows),
    )
