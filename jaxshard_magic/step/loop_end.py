"""Agree between hosts on the end of a loop, so that all save the last state."""

from collections.abc import Callable

from ..coordination import LONG_S, Agreement, is_multiprocess
from .multihost_calls import MultihostCalls

LATE_S = 3.0  # seconds after which hosts at their end release the others from the barrier before a call
EARLY_S = 2.0  # seconds for hosts to compare the calls of a stopped loop, and as many to write its last state
SETTLES_S = 1.0  # seconds for the previous save


class LoopEnd:
    """End of one loop. All hosts create an instance before the loop; a single process always agrees with itself."""

    def __init__(self) -> None:
        self._verdict = Agreement() if is_multiprocess() else None

    def hosts_agree(self, calls: int, settles: Callable[[float], bool], early: BaseException | None) -> bool:
        """Return whether all hosts end after the same number of calls.

        Args:
            calls: Number of calls made by this host.
            settles: Waits up to the given number of seconds for the previous save, and returns whether it is written.
            early: Exception that stopped the loop; None for a regular end.
        """
        if self._verdict is None:
            return True
        if early is None:
            # A host without more calls waits for the others, and they may wait for its next call: after LATE_S it
            # releases them.
            self._verdict.submit(str(calls))
            agreed = self._verdict.wait_for_result(str(calls), LATE_S)
            if agreed is None:
                _release_hosts(None)
                agreed = self._verdict.wait_for_result(str(calls), LONG_S)
            return bool(agreed)
        # Without barriers before calls, a stopped loop waits for no other host. A stopped cell has to end soon, so a
        # long save is not waited for, either.
        if not MultihostCalls.release_hooks:
            return False
        _release_hosts(early)
        outcome = str(calls) if settles(SETTLES_S) else "still saving"
        return self._verdict.agreed(outcome, EARLY_S) and outcome == str(calls)

    def limit_save(self, seconds: float) -> float:
        """Return the time limit in seconds for the last save of a stopped loop."""
        return seconds if self._verdict is None else min(seconds, EARLY_S)


def _release_hosts(error: BaseException | None) -> None:
    """Release the hosts waiting at a barrier before their next call; `error` is None at the end of the loop."""
    for leave in MultihostCalls.release_hooks:
        leave(error)
