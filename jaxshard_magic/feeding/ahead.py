"""Batches that a thread of its own takes from a loader, a few ahead of the loop."""

import atexit
import contextvars
import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from ..temporary import Held

LOOK = 0.001  # seconds from one look at busy devices to the next, while there is no batch
END_S = 2.0  # seconds that the end of Python waits for a loader
_ALL: "weakref.WeakSet[Ahead]" = weakref.WeakSet()


@dataclass(frozen=True)
class Taken:
    """A batch, what the loader's state was behind it, or what the loader raised, StopIteration at its end."""

    batch: Any = None
    state: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class Source:
    """A loader and the lock under which one thread at a time touches it. `wanted(batch)` tells whether the
    loop gets a batch, `ready(batch)` gives what it gets of it."""

    iterable: Any
    lock: Any
    wanted: Callable[[Any], bool]
    ready: Callable[[Any], Any]


class Ahead:
    """One pass over a loader. The thread ends when `stop` is called, at the loader's end and when it raises; `take`
    starts it again. What it has taken meanwhile is kept.

    A pass begins at `state`, where there is one, or behind the first `skip` batches.
    """

    def __init__(self, source: Source, ahead: int, state: Any = None, skip: int = 0):
        self._source, self._ahead = source, ahead
        self._state, self._skip = state, skip
        self.given = skip  # batches of the pass that are behind `take`, those that were left out with them
        self._items: deque[Taken] = deque()
        self._iterator: Iterator[Any] | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._thread: threading.Thread | None = None
        _ALL.add(self)

    def take(self, busy: Callable[[], bool]) -> tuple[Taken, float]:
        """The next batch; and the seconds that were waited for it while the devices were not `busy()`."""
        since = None
        while True:
            with Held(self._lock):
                if self._items:
                    taken = self._items.popleft()
                    self.given += taken.error is None
                    self._changed.notify_all()
                    break
                self._run()
                if since is None and not busy():
                    since = time.perf_counter()
                self._changed.wait(LOOK if since is None else None)
        return taken, 0.0 if since is None else time.perf_counter() - since

    def go_to(self, state: Any, skip: int = 0) -> None:
        """Go on at another place of the loader. Waits for what the thread is at."""
        self.stop()
        self.join()
        self._items.clear()
        self._state, self._skip = state, skip
        self.given = skip

    def leave_out(self, count: int) -> None:
        """Go on `count` batches later: they are loaded, as far as they aren't yet, and dropped. Waits for what the
        thread is at."""
        self.stop()
        self.join()
        self.given += count
        while count and self._items and self._items[0].error is None:
            self._items.popleft()
            count -= 1
        self._skip += count

    def stop(self) -> None:
        """Take nothing more; from any thread, and from a finalizer."""
        with Held(self._lock):
            self._stopped = True
            self._changed.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        thread = self._thread  # which ends at any moment, and is None then
        if thread is not None:
            thread.join(seconds)

    def _run(self) -> None:
        """Have a thread that takes batches."""
        if self._thread is not None and self._thread.is_alive():
            if self._stopped:  # it goes on
                self._stopped = False
                self._changed.notify_all()
            return
        self._stopped = False
        context, wide = contextvars.copy_context(), bool(jax.config.read("jax_enable_x64"))
        self._thread = threading.Thread(
            target=context.run, args=(self._work, wide), name="jaxshard_magic feed", daemon=True
        )
        self._thread.start()

    def _work(self, wide: bool) -> None:
        with jax.enable_x64(wide):  # a setting of the loop's thread
            while True:
                with Held(self._lock):
                    while len(self._items) >= self._ahead and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        self._thread = None
                        return
                taken = self._next()
                with Held(self._lock):
                    self._items.append(taken)
                    if taken.error is not None:
                        self._thread = None
                    self._changed.notify_all()
                    if taken.error is not None:
                        return

    def _next(self) -> Taken:
        try:
            with self._source.lock:
                batch, state = self._batch()
            return Taken(self._source.ready(batch), state)
        except BaseException as error:  # raised in the loop, at this batch's place
            return Taken(error=error)

    def _batch(self) -> tuple[Any, Any]:
        if self._iterator is None:
            self._iterator = iter(self._source.iterable)
        if self._state is not None:
            self._iterator.set_state(self._state)  # pyright: ignore[reportAttributeAccessIssue]
            self._state = None
        while True:
            batch = next(self._iterator)
            if self._source.wanted(batch):
                if self._skip == 0:
                    break
                self._skip -= 1
        has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        return batch, copy.deepcopy(self._iterator.get_state()) if has_state else None  # pyright: ignore


@atexit.register
def _end() -> None:
    living = list(_ALL)
    for each in living:
        each.stop()
    until = time.monotonic() + END_S
    for each in living:
        each.join(max(0.0, until - time.monotonic()))
