"""Whether hosts have come to the end of a loop together, so that they save its last state."""

from collections.abc import Callable

from ..coordination import LONG_S, Verdict, is_there
from .together import OnHosts

LATE_S = 3.0  # after which those that have ended let the others out of the call that they wait to make
EARLY_S = 2.0  # for hosts to say how far a loop came that was stopped, and once more to write its last state

SETTLES_S = 1.0  # for the save before it


class Ending:
    """The end of one loop, which all hosts make before it; on one process it is always alike."""

    def __init__(self) -> None:
        self._verdict = Verdict() if is_there() else None

    def is_alike(self, calls: int, settles: Callable[[float], bool], early: BaseException | None) -> bool:
        """Whether all hosts end after the same number of calls. `settles(seconds)`: whether the save before is written
        within these; `early`: what stopped the loop.

        One that has no more calls to make waits for the others, which may wait for it to make their next: after a
        while, or at once where it was stopped, it lets them out. Where hosts do not meet before each call, those of a
        loop that was stopped are not waited for. A cell that was stopped ends soon: nor is a longer save before.
        """
        if self._verdict is None:
            return True
        if early is None:
            self._verdict.say(str(calls))
            found = self._verdict.heard(str(calls), LATE_S)
            if found is None:
                _leave(None)
                found = self._verdict.heard(str(calls), LONG_S)
            return bool(found)
        if not OnHosts.leave:
            return False
        _leave(early)
        here = str(calls) if settles(SETTLES_S) else "still saving"
        return self._verdict.agreed(here, EARLY_S) and here == str(calls)

    def limited(self, seconds: float) -> float:
        """How long the last save of a loop that was stopped is waited for."""
        return seconds if self._verdict is None else min(seconds, EARLY_S)


def _leave(error: BaseException | None) -> None:
    for leave in OnHosts.leave:
        leave(error)
