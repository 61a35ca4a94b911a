"""What the report of a step tells its reader to look at, each with a fix to paste; one small rule each."""

from collections.abc import Callable, Iterable, Iterator

from ...report import Advice
from .case import Case as Case
from .experts import dropped, empty_places, uneven
from .fit import does_not_fit, replicated_state
from .layout import idle, not_cut, whole
from .loop import Loop as Loop
from .loop import astray, input_bound, recompiles, slower
from .program import batch_grew, host_calls, not_donated, unknown_loops
from .recorded import slow_device, waits_for_python
from .speed import communication, every_trip, float32, large_gather, slow_links, small_batch, wide_axis

LEVELS = ("error", "warning", "info")
RULES: tuple[Callable[[Case], Iterator[Advice]], ...] = (
    *(does_not_fit, replicated_state, not_cut, idle, whole),
    *(communication, every_trip, large_gather, slow_links, wide_axis, small_batch, float32),
    *(slow_device, waits_for_python),
    *(dropped, uneven, empty_places),
    *(unknown_loops, host_calls, not_donated, batch_grew),
    *(astray, recompiles, input_bound, slower),
)


def advise(case: Case) -> tuple[Advice, ...]:
    """What is off with a sharded step, errors first, then warnings, of each kind first what has a cure and saves
    most.

    What would make it fit is not said once more for its own sake.
    """
    every = [advice for rule in RULES for advice in rule(case)]
    fixes = {advice.fix for advice in every if advice.code in ("does-not-fit", "would-fit")}
    return by_level(a for a in every if a.code != "not-donated" or a.fix not in fixes)


def by_level(advice: Iterable[Advice]) -> tuple[Advice, ...]:
    """Errors first, then warnings; of each kind first what has a cure, what saves most before others, then in the order
    that it is given in."""

    def place(one: Advice) -> tuple[int, bool, float]:
        return LEVELS.index(one.level), not (one.fix and one.saves), -(one.saves or 0.0)

    return tuple(sorted(advice, key=place))
