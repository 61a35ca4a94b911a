"""A pipeline in time: measured, or predicted for a chip, as a range."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from ..hardware import Chip
from ..pipeline.executed import Pipeline
from ..pipeline.record import Run
from ..report import Leaf
from ..report import Pipeline as PipelineReport
from ..schedule import Costs, simulate
from ..targets import Target
from .pipelined import measured, of_model
from .roofline import total
from .staged import Staged
from .staged_costs import BEST, HIGH, LOW, around_seconds, flops_costs, roofline_costs, update_seconds
from .timeline import timeline

if TYPE_CHECKING:
    from ..step import Entry

_timelines: "WeakKeyDictionary[Entry, dict[str, tuple[Run | Costs | None, PipelineReport]]]" = (
    WeakKeyDictionary()
)


class InTime(NamedTuple):
    """A pipeline in time: as it ran, or as its programs are predicted to run on the chip that stands for simulated
    devices; what advice is of, which the times of those are not; the seconds that a step is predicted to take on the
    chip: at least, guessed best and at most, each None where that is not known; and the run that was measured."""

    shown: PipelineReport
    advised: PipelineReport
    seconds: Sequence[float | None]
    run: Run | None = None


def in_time(
    entry: "Entry",
    pipeline: Pipeline,
    staged: Staged,
    leaves: Sequence[Leaf],
    *,
    recorded: Run | None,
    chip: Chip | None,
    target: Target | None,
    simulated: bool,
) -> InTime:
    """The pipeline of `entry` in time, by what the profiler `recorded` where there is that: predictions are for `chip`,
    or by FLOPs alone; on `simulated` devices those for a chip are what is shown."""
    schedule = pipeline.split.schedule
    costs: Costs | None = None
    seconds: Sequence[float | None] = (None, None, None)
    if chip is not None:
        guesses = LOW, BEST, HIGH
        every = [roofline_costs(pipeline, chip, target, staged.said, guess) for guess in guesses]
        update = update_seconds(pipeline, chip, leaves)
        around = around_seconds(pipeline, chip, target, staged.said)
        costs = every[1]
        seconds = tuple(
            total([its and simulate(schedule, its).makespan, update, around and guess.sent * around])
            for its, guess in zip(every, guesses, strict=True)
        )
    run = recorded or pipeline.typical

    def predicted() -> PipelineReport:
        return timeline(schedule, costs or flops_costs(pipeline), "" if costs is None else "s")

    def kept(how: str, key: Run | Costs | None, made: Callable[[], PipelineReport]) -> PipelineReport:
        known = _timelines.setdefault(entry, {})
        if how not in known or known[how][0] != key:
            known[how] = key, of_model(made(), staged.holds, staged.devices, staged.activation_bytes)
        return known[how][1]

    if run is None or (simulated and costs is not None):  # a CPU's times are none of that chip's
        shown = kept("predicted", costs, predicted)
        return InTime(shown, shown, seconds)
    shown = kept("measured", run, lambda: measured(run, staged.split, staged.alike))
    if recorded is not None:
        shown = replace(shown, recorded=True)
    return InTime(shown, kept("predicted", costs, predicted) if simulated else shown, seconds, run)
