"""Advice in the report of a step: small independent rules, each with a fix to paste where one exists."""

from collections.abc import Callable, Iterable, Iterator

from ...report import Advice
from .case import Case as Case
from .experts import dropped, empty_places, uneven
from .fit import does_not_fit, replicated_state
from .layout import idle, replicated_leaves, unsharded_leaves
from .loop import TrainingLoop as TrainingLoop
from .loop import input_bound, loss_not_finite, recompiles, slower
from .program import batch_grew, host_calls, not_donated, slow_device, unknown_loops, waits_for_python
from .speed import communication, every_trip, float32, large_gather, slow_links, small_batch, wide_axis

LEVELS = ("error", "warning", "info")
RULES: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    *(does_not_fit, replicated_state, unsharded_leaves, idle, replicated_leaves),
    *(communication, every_trip, large_gather, slow_links, wide_axis, small_batch, float32),
    *(slow_device, waits_for_python),
    *(dropped, uneven, empty_places),
    *(unknown_loops, host_calls, not_donated, batch_grew),
    *(loss_not_finite, recompiles, input_bound, slower),
)


def advise(case: Case) -> tuple[Advice, ...]:
    """Return the advice on a sharded step: errors first, then warnings, and of each level the largest saving with a fix
    first.

    Advice to donate state is left out where a change to make the step fit already says so.
    """
    every = [advice for rule in RULES for advice in rule(case)]
    fixes = {advice.fix for advice in every if advice.code in ("does-not-fit", "would-fit")}
    return by_level(a for a in every if a.code != "not-donated" or a.fix not in fixes)


def by_level(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """Return advice sorted by level.

    Errors come first, then warnings, then information. Within a level, advice with a fix and a known saving comes
    first, largest saving first; the given order decides the rest.
    """

    def place(one: Advice) -> tuple[int, bool, float]:
        return LEVELS.index(one.level), not (one.fix and one.saves), -(one.saves or 0.0)

    # `sorted` is stable: advice with equal keys stays in the order of the rules.
    return tuple(sorted(advice, key=place))
