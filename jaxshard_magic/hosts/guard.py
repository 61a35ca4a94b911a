"""On a host: no host enters a step unless all do.

Before each step of a cell stand one barrier and one look at a key, of jax's coordination service. A host that raises,
ends early or is interrupted sets the key to the number of the barrier that it would come to next, and comes to that, so
that the others leave there as well: nobody waits in a collective, and all hold the state of the same step. The number
matters: a message that is read one barrier early would tear them apart.

Ctrl-C is taken up where the next step begins, never between a call and the assignment of what it gives; at once where
the cell has made no step, and the second time.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..coordination import Late, barrier, tell, told

HOUR_S = 3600.0
LEAVING_S = 10.0
INTERRUPTED = "interrupted"


class HostFailed(RuntimeError):
    """Another host failed; what this one holds is that of the last step."""


class Guard:
    """The steps of one cell on one host: `cell` is its name, the same on all hosts and of no other cell."""

    def __init__(self, cell: str, host: int):
        self._cell, self._host = cell, host
        self._count = 0
        self._asked = 0  # for an end, by Ctrl-C
        self.left = False

    @property
    def steps(self) -> int:
        """Steps that all hosts began."""
        return self._count - self.left

    def check(self) -> None:
        """Come here before a step. Raises KeyboardInterrupt where one of the hosts was interrupted, HostFailed where
        one has failed or ended."""
        if self._asked:
            self._say(INTERRUPTED)
        try:
            self._meet(HOUR_S)
        except Late as error:
            raise HostFailed(str(error)) from None
        number, _, said = (told(self._key) or "0 ").partition(" ")
        if 0 < int(number) <= self._count:
            self.left = True
            if said.endswith(f": {INTERRUPTED}"):
                raise KeyboardInterrupt
            raise HostFailed(said)

    def leave(self, why: str, seconds: float = LEAVING_S) -> None:
        """Tell the others that this host makes no more steps, and let them out of the barrier that they wait in."""
        if self.left:
            return
        self.left = True
        self._say(why)
        try:
            self._meet(seconds)
        except Late:
            return  # none was waiting

    @contextmanager
    def runs(self) -> Iterator[None]:
        """While the cell runs: an interrupt waits for the next step, and what the cell raises is told to the others."""
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        except HostFailed:
            raise
        except KeyboardInterrupt:
            self.leave(INTERRUPTED)
            raise
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes late would end the engine

    @property
    def _key(self) -> str:
        return f"jaxshard/cell/{self._cell}/failed"

    def _meet(self, seconds: float) -> None:
        self._count += 1
        barrier(f"jaxshard/cell/{self._cell}/{self._count}", seconds)

    def _say(self, why: str) -> None:
        tell(self._key, f"{self._count + 1} host {self._host}: {why}"[:500])

    def _interrupt(self, *_: Any) -> None:
        self._asked += 1
        if self._asked > 1 or self._count == 0:  # without a step there is nothing to tear
            raise KeyboardInterrupt
