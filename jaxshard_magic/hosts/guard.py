"""On a host: hosts end a cell together, after the same step.

Before each step of a cell stand one barrier and one look at a key, of jax's coordination service: a meeting. A host
that raises, ends early or is interrupted sets the key of the meeting that it would come to next, and comes to that, so
that the others leave there as well: nobody waits in a collective, and all hold the state of the same step. Each meeting
has a key of its own: a message that is read one meeting early, or not at all, would tear them apart.

A host whose call is of another kind than its last one, other shapes for example, sets that key as well: then all say
what they call, and none of them begins a program that another one does not run.

Above `pace.FEW` hosts, or where it is asked for, they meet before every so many steps. Host 0 measures how many, and
says so before a meeting behind which all read it, so that all have the same number. Whoever is interrupted goes on to
the next meeting, as all do. Only a host that raises in between can't: the steps that the others have begun without it
never end (`watch`).

Ctrl-C is taken up where the next meeting is, never between a call and the assignment of what it gives; at once where
the cell has made no step, and the second time.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from ..coordination import Late, barrier, tell, told
from . import pace

HOUR_S = 3600.0
LEAVING_S = 10.0
INTERRUPTED = "interrupted"


class HostFailed(RuntimeError):
    """Another host failed; what this one holds is that of the last step."""


def reason(error: BaseException) -> str:
    """What a host tells the others that raised something."""
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


class Call(Protocol):
    """A step that a host is about to make; `is_new` where its last one was of another kind."""

    is_new: bool

    def compare(self) -> None:
        """Hold it against what the other hosts call, all of which do so. Raises on all where it is something else."""
        ...


class Guard:
    """The steps of one cell on one host of `hosts`: `cell` is its name, the same on all hosts and of no other cell.
    They meet before each of `every` steps, the same number on all; by their number and their pace where it is None."""

    def __init__(self, cell: str, host: int, hosts: int, every: int | None = None):
        self._cell, self._host = cell, host
        self._measured = every is None and hosts > pace.FEW
        self.every = every or 1
        self._clock = pace.Clock()
        self._meetings = 0
        self._due = 0  # the steps after which they meet
        self._asked = 0  # for an end, by Ctrl-C
        self.left = False
        self.steps = 0  # that this host began

    def check(self, call: Call | None = None) -> None:
        """Come here before a step, which is `call`. Raises KeyboardInterrupt where one of the hosts was interrupted,
        HostFailed where one has failed or ended; and what `call` raises where it is not what the others call."""
        if self.steps == self._due:
            self._check(call)
            self._due += self.every
        self.steps += 1

    def _check(self, call: Call | None) -> None:
        if self._asked:
            self._say(INTERRUPTED)
        elif call is not None and call.is_new:
            self._look()
        measured = self._measured and pace.is_measured_at(self._meetings + 1)
        if measured and self._host == 0:
            tell(
                f"{self._key}/every/{self._meetings + 1}",
                str(pace.steps_between(*self._clock.read(self.steps))),
            )
        start = time.monotonic()
        try:
            self._meet(HOUR_S)
        except Late as error:
            raise HostFailed(str(error)) from None
        look = told(f"{self._key}/look/{self._meetings}")
        self._clock.met(time.monotonic() - start)
        if look:
            self._heed()
            if call is not None:
                call.compare()
        if measured:
            self.every = int(told(f"{self._key}/every/{self._meetings}") or self.every)

    def _heed(self) -> None:
        number, _, said = (told(f"{self._key}/failed") or "0 ").partition(" ")
        if 0 < int(number) <= self._meetings:
            self.left = True
            if said.endswith(f": {INTERRUPTED}"):
                raise KeyboardInterrupt
            raise HostFailed(said)

    def leave(self, why: str, seconds: float = LEAVING_S) -> None:
        """Tell the others that this host makes no more steps, and let them out of the meeting that they wait in."""
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
        """While the cell runs: an interrupt waits for the next meeting, and what it raises is told to the others."""
        signal.signal(signal.SIGINT, self.interrupt)
        try:
            yield
        except HostFailed:
            raise
        except BaseException as error:
            self.leave(reason(error))
            raise
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one that comes late would end the engine

    @property
    def _key(self) -> str:
        return f"jaxshard/cell/{self._cell}"

    def _meet(self, seconds: float) -> None:
        self._meetings += 1
        barrier(f"{self._key}/{self._meetings}", seconds)

    def _say(self, why: str) -> None:
        tell(f"{self._key}/failed", f"{self._meetings + 1} host {self._host}: {why}"[:500])
        self._look()

    def _look(self) -> None:
        """Have all hosts look around at the next meeting: at what failed, and what is called."""
        tell(f"{self._key}/look/{self._meetings + 1}", "1", over=True)

    def interrupt(self, *_: Any) -> None:
        """Ask for an end at the next meeting; it is `signal`'s handler. Raises KeyboardInterrupt the second time, and
        where no step was made."""
        self._asked += 1
        if self._asked > 1 or self._meetings == 0:  # without a step there is nothing to tear
            raise KeyboardInterrupt
