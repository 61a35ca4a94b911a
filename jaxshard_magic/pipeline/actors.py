"""One thread for each rank of a pipeline, which runs its actions and hands arrays to the others."""

import queue
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_STOP, _RUN = object(), object()


class Stopped(Exception):
    """Another rank has failed, or the user has interrupted."""


class Actor(threading.Thread):
    """A rank's thread, for the life of a pipeline, with an inbox of (key, value). It waits for nothing but the key that
    it needs next."""

    def __init__(self, rank: int):
        super().__init__(daemon=True, name=f"pipeline rank {rank}")
        self.rank = rank
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._there: dict[Hashable, Any] = {}
        self.start()

    def give(self, key: Hashable, value: Any) -> None:
        """Put a value into the inbox, from any thread."""
        self._inbox.put((key, value))

    def take(self, key: Hashable) -> Any:
        """The value of `key`, once it is there; in the actor's own thread. Raises Stopped where the run was stopped."""
        while key not in self._there:
            found, value = self._inbox.get()
            if found is _STOP:
                raise Stopped
            self._there[found] = value
        return self._there.pop(key)

    def run(self) -> None:
        while True:
            key, value = self._inbox.get()
            if key is _RUN:
                self._do(*value)
            elif key is not _STOP:
                self._there[key] = value
            del value

    def _do(self, work: Callable[["Actor"], None], done: queue.SimpleQueue) -> None:
        error = None
        try:
            work(self)
        except BaseException as raised:  # all of it is raised again, in the thread that called
            error = raised
        done.put((self.rank, error))

    def clear(self) -> None:
        """Let go of what a stopped run has left; the actor must be idle."""
        self._there.clear()
        while not self._inbox.empty():
            self._inbox.get_nowait()


def together(actors: Sequence[Actor], work: Callable[[Actor], None]) -> None:
    """Run `work(actor)` in every actor's thread and wait for all of them.

    Where one raises, or the user interrupts, the others are stopped, what is on its way is dropped, and that error is
    raised once all are idle.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()
    for actor in actors:
        actor.give(_RUN, (work, done))
    failed: BaseException | None = None
    left = len(actors)
    while left:
        try:
            rank, error = done.get()
        except KeyboardInterrupt as interrupt:
            rank, error = None, interrupt
        else:
            left -= 1
        if error is None:
            continue
        if failed is None or isinstance(failed, Stopped):
            failed = error
            if rank is not None and not isinstance(error, Stopped):
                error.add_note(f"raised in stage {rank} of the pipeline")
        for actor in actors:
            actor.give(_STOP, None)
    if failed is not None:
        for actor in actors:
            actor.clear()
        raise failed
