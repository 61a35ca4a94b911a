"""One thread per pipeline rank, with an inbox for arrays from other ranks."""

import queue
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

_STOP = object()
# Seconds. A wait for a lock must end now and then: on Windows, and if it comes from another thread, an interrupt does
# not wake a waiting thread.
_WAKE = 0.1


class RunStopped(Exception):
    """Exception in a rank after another rank failed or the user interrupted."""


class Actor:
    """Thread of a rank, with an inbox of keys and values.

    A reader waits for its key only, in any order of arrival.

    Footgun: the thread ends when the actor is garbage collected. Between jobs it must reference neither the actor nor
    the last job, which closes over the actor: both would stay alive for ever.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int):
        self.rank = rank
        self.run: _ActorRun | None = None
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self.reset()
        threading.Thread(target=_serve, args=(self._jobs,), daemon=True, name=f"pipeline rank {rank}").start()
        # The thread has the queue only, so the actor can be garbage collected; None then ends the thread.
        weakref.finalize(self, self._jobs.put, None)

    def put(self, key: Hashable, value: Any) -> None:
        """Put a value into the inbox, from any thread.

        Raises:
            RunStopped: The run was stopped.
        """
        if self.run is not None and self.run.stopped:
            raise RunStopped
        self._inbox.put((key, value))

    def take(self, key: Hashable) -> Any:
        """Wait for the value of `key` and return it; in the actor's own thread only.

        Raises:
            RunStopped: The run was stopped.
        """
        if self.run is not None and self.run.stopped:
            raise RunStopped
        there = self._received
        if key in there:
            return there.pop(key)
        while True:
            name, value = self._inbox.get()
            if name is _STOP:
                raise RunStopped
            if name == key:
                return value
            there[name] = value

    def submit(self, job: Callable[[], Any]) -> None:
        """Call `job` in the thread, after all earlier jobs. `job` must not raise."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Wake the actor from waiting for a key."""
        self._inbox.put((_STOP, None))

    def reset(self) -> None:
        """Drop the finished run and unread values. The thread must be idle."""
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._received: dict[Hashable, Any] = {}
        self.run = None


def _serve(jobs: queue.SimpleQueue) -> None:
    while (job := jobs.get()) is not None:
        job()
        # While the thread waits for its next job, a reference here would keep the actor of the last one alive.
        del job


class _ActorRun:
    """Shared state of all actors in one run.

    Args:
        actors: The actors.
        work: Called with each actor in its thread.

    Attributes:
        errors: Rank and exception of each failure, the first one first.
    """

    def __init__(self, actors: Sequence[Actor], work: Callable[[Actor], Any]):
        self._actors, self._work = actors, work
        self.stopped = False
        self.errors: list[tuple[int, BaseException]] = []

    def run_part(self, actor: Actor) -> None:
        """Run the part of one actor, in its thread."""
        try:
            self._work(actor)
        except RunStopped:
            pass
        except BaseException as error:  # raised again by `run_on_actors`, in the calling thread
            self.errors.append((actor.rank, error))
            self.stop()

    def stop(self) -> None:
        self.stopped = True
        for actor in self._actors:
            actor.stop()


def run_on_actors(actors: Sequence[Actor], work: Callable[[Actor], Any]) -> None:
    """Run `work(actor)` in every actor's thread and wait for all; one call at a time.

    If one raises or the user interrupts, the others are stopped and undelivered values are dropped. Once all are idle,
    the first error is raised with a note of its rank. A program can't be interrupted before it returns. A second
    interrupt does not wait for running programs, but the next call does.
    """
    # A second interrupt may have left the programs of the last call running.
    _stop_and_wait(actors)
    run = _ActorRun(actors, work)
    try:
        for actor in actors:
            actor.run = run
        for actor in actors:
            actor.submit(lambda actor=actor: run.run_part(actor))
        _wait_until_idle(actors)
    except BaseException:
        _stop_and_wait(actors)
        raise
    for actor in actors:
        actor.reset()
    if run.errors:
        rank, error = run.errors[0]
        error.add_note(f"in rank {rank} of the pipeline")
        try:
            raise error
        finally:
            # The traceback of the error references this frame, and the frame the error: a cycle.
            del run, error


def _stop_and_wait(actors: Sequence[Actor]) -> None:
    """Stop running actors, wait for them, and reset them."""
    busy = [actor for actor in actors if actor.run is not None]
    for run in {actor.run for actor in busy if actor.run is not None}:
        run.stop()
    _wait_until_idle(busy)
    for actor in busy:
        actor.reset()


def _wait_until_idle(actors: Sequence[Actor]) -> None:
    """Wait until all submitted jobs are done."""
    # New locks for each wait: an interrupted wait leaves its locks to the threads, which release them later.
    locks = [threading.Lock() for _ in actors]
    for actor, lock in zip(actors, locks, strict=True):
        lock.acquire()
        actor.submit(lock.release)
    for lock in locks:
        while not lock.acquire(timeout=_WAKE):
            pass
