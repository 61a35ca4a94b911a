"""One thread for each rank of a pipeline, which runs its actions and hands arrays to the others."""

import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_STOP = object()
_WAKE = 0.1  # seconds; on Windows, and where it comes from another thread, an interrupt wakes no thread that waits


class Stopped(Exception):
    """Another rank has failed, or the user has interrupted."""


class Actor:
    """A rank's thread, and an inbox of (key, value) for every run. It waits for nothing but the key that it needs next.

    The thread holds no actor but while it works for one, and ends once its actor is garbage.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.run: _Run | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.leave()
        threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name=f"pipeline rank {rank}").start()
        weakref.finalize(self, self._jobs.put, None)

    def give(self, key: Hashable, value: Any) -> None:
        """Put a value into the inbox, from any thread. Raises Stopped where the run was stopped."""
        if self.run is not None and self.run.stopped:
            raise Stopped
        self._inbox.put((key, value))

    def take(self, key: Hashable) -> Any:
        """The value of `key`, once it is there; in the actor's own thread. Raises Stopped where the run was stopped."""
        if self.run is not None and self.run.stopped:
            raise Stopped
        there = self._there
        if key in there:
            return there.pop(key)
        while True:
            name, value = self._inbox.get()
            if name is _STOP:
                raise Stopped
            if name == key:
                return value
            there[name] = value

    def do(self, job: Callable[[], Any]) -> None:
        """Have the thread call this after all that it was told before; it must raise nothing."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Wake the actor where it waits for a key."""
        self._inbox.put((_STOP, None))

    def leave(self) -> None:
        """The run is over: let go of it and of what it has left. The thread must be idle."""
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._there: dict[Hashable, Any] = {}
        self.run = None


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class _Run:
    """What the actors of one run have in common. `errors`: what was raised, with its rank, the first one first."""

    def __init__(self, actors: Sequence[Actor], work: Callable[[Actor], Any]):
        self._actors, self._work = actors, work
        self.stopped = False
        self.errors: list[tuple[int, BaseException]] = []

    def of(self, actor: Actor) -> None:
        """An actor's part, in its thread."""
        try:
            self._work(actor)
        except Stopped:
            pass
        except BaseException as error:  # raised again in the thread that called
            self.errors.append((actor.rank, error))
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        for actor in self._actors:
            actor.stop()


def together(actors: Sequence[Actor], work: Callable[[Actor], Any]) -> None:
    """Run `work(actor)` in every actor's thread and wait for all of them; one call at a time.

    Where one raises, the others are stopped, what is on its way is dropped, and the first error is raised, with a note
    of its rank, once all are idle. So it is where the user interrupts: no actor can leave a program before it returns,
    but a second interrupt doesn't wait for them; the next call does.
    """
    _settle(actors)
    run = _Run(actors, work)
    try:
        for actor in actors:
            actor.run = run
        for actor in actors:
            actor.do(lambda actor=actor: run.of(actor))
        _wait(actors)
    except BaseException:
        _settle(actors)
        raise
    for actor in actors:
        actor.leave()
    if run.errors:
        rank, error = run.errors[0]
        error.add_note(f"in rank {rank} of the pipeline")
        try:
            raise error
        finally:
            del run, error  # the error's traceback holds this frame


def _settle(actors: Sequence[Actor]) -> None:
    """Stop what actors still run, wait for it, and let go of it."""
    busy = [actor for actor in actors if actor.run is not None]
    for run in {actor.run for actor in busy if actor.run is not None}:
        run.stop()
    _wait(busy)
    for actor in busy:
        actor.leave()


def _wait(actors: Sequence[Actor]) -> None:
    """Until they have done all that they were told; an interrupt leaves nothing locked that their threads need."""
    locks = [threading.Lock() for _ in actors]
    for actor, lock in zip(actors, locks, strict=True):
        lock.acquire()
        actor.do(lock.release)
    for lock in locks:
        while not lock.acquire(timeout=_WAKE):
            pass
