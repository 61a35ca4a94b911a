"""Prefetch of batches from a loader in a background thread, a few ahead of the loop."""

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

from ..temporary import AcquiredLock

POLL_S = 0.001  # seconds between polls of busy devices while no batch is ready
EXIT_WAIT_S = 2.0  # seconds that Python's exit waits for loaders
_PREFETCHERS: "weakref.WeakSet[Prefetcher]" = weakref.WeakSet()


@dataclass(frozen=True)
class LoadedBatch:
    """A loaded batch, or the error raised in its place.

    Attributes:
        batch: The batch, prepared for the loop.
        state: Copy of the loader iterator's state behind the batch; None for loaders without one.
        error: Exception raised by the loader; StopIteration at its end.
    """

    batch: Any = None
    state: Any = None
    error: BaseException | None = None


@dataclass(frozen=True)
class SharedLoader:
    """A loader shared by threads.

    Attributes:
        iterable: The loader.
        lock: Held while a thread uses the loader.
        accepts: Return whether the loop gets a batch.
        prepare: Return a batch as the loop gets it.
    """

    iterable: Any
    lock: Any
    accepts: Callable[[Any], bool]
    prepare: Callable[[Any], Any]


class Prefetcher:
    """A pass over a loader in a background thread.

    The thread ends at `stop`, at the loader's end and at an error; `next_batch` starts it again. Batches loaded before
    are kept.

    Args:
        source: The loader.
        limit: Most batches loaded and not yet taken.
        state: Iterator state at which the pass begins; None for the loader's start.
        skip: Number of batches to drop first.
    """

    def __init__(self, source: SharedLoader, limit: int, state: Any = None, skip: int = 0):
        self._source, self._limit = source, limit
        self._state, self._skip_count = state, skip
        self.returned_count = skip  # batches taken from the pass, skipped ones included
        self._loaded: deque[LoadedBatch] = deque()
        self._iterator: Iterator[Any] | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopped = False
        self._thread: threading.Thread | None = None
        # Weak references: `_stop_all` needs the running threads at exit, and must not keep finished passes alive.
        _PREFETCHERS.add(self)

    def next_batch(self, is_busy: Callable[[], bool]) -> tuple[LoadedBatch, float]:
        """Return the next batch, and the seconds waited for it while the devices were idle.

        Args:
            is_busy: Return whether the devices have work. Polled every `POLL_S` seconds until they are idle.
        """
        idle_since = None
        while True:
            with AcquiredLock(self._lock):
                if self._loaded:
                    taken = self._loaded.popleft()
                    self.returned_count += taken.error is None
                    self._changed.notify_all()
                    break
                self._ensure_thread()
                if idle_since is None and not is_busy():
                    idle_since = time.perf_counter()
                # Idle devices stay idle until the loop has its batch, so polling ends there.
                self._changed.wait(POLL_S if idle_since is None else None)
        return taken, 0.0 if idle_since is None else time.perf_counter() - idle_since

    def seek(self, state: Any, skip: int = 0) -> None:
        """Continue at another iterator state and drop `skip` batches first; wait for the batch being loaded."""
        self.stop()
        self.join()
        self._loaded.clear()
        self._state, self._skip_count = state, skip
        self.returned_count = skip

    def skip(self, count: int) -> None:
        """Continue `count` batches later, and wait for the batch being loaded. Skipped batches are loaded and
        dropped."""
        self.stop()
        self.join()
        self.returned_count += count
        while count and self._loaded and self._loaded[0].error is None:
            self._loaded.popleft()
            count -= 1
        self._skip_count += count

    def stop(self) -> None:
        """Load nothing more. Safe from any thread and from a finalizer."""
        with AcquiredLock(self._lock):
            self._stopped = True
            self._changed.notify_all()

    def join(self, seconds: float | None = None) -> None:
        """Wait at most `seconds` (None: no limit) until the thread has ended."""
        thread = self._thread  # read once: the thread sets it to None as it ends
        if thread is not None:
            thread.join(seconds)

    def _ensure_thread(self) -> None:
        """Start the thread, or resume a thread told to stop."""
        if self._thread is not None and self._thread.is_alive():
            if self._stopped:  # told to stop, but not at that point yet
                self._stopped = False
                self._changed.notify_all()
            return
        self._stopped = False
        # `jax_enable_x64` may be set for the loop's thread alone, and new threads do not inherit that.
        context, x64 = contextvars.copy_context(), bool(jax.config.read("jax_enable_x64"))
        self._thread = threading.Thread(
            target=context.run, args=(self._load_batches, x64), name="jaxshard_magic feed", daemon=True
        )
        self._thread.start()

    def _load_batches(self, x64: bool) -> None:
        with jax.enable_x64(x64):
            while True:
                with AcquiredLock(self._lock):
                    while len(self._loaded) >= self._limit and not self._stopped:
                        self._changed.wait()
                    if self._stopped:
                        self._thread = None
                        return
                taken = self._load_next()
                with AcquiredLock(self._lock):
                    self._loaded.append(taken)
                    if taken.error is not None:
                        self._thread = None
                    self._changed.notify_all()
                    if taken.error is not None:
                        return

    def _load_next(self) -> LoadedBatch:
        try:
            with self._source.lock:
                batch, state = self._read_batch()
            return LoadedBatch(self._source.prepare(batch), state)
        except BaseException as error:  # raised in the loop, in place of the batch
            return LoadedBatch(error=error)

    def _read_batch(self) -> tuple[Any, Any]:
        if self._iterator is None:
            self._iterator = iter(self._source.iterable)
        if self._state is not None:
            self._iterator.set_state(self._state)  # pyright: ignore[reportAttributeAccessIssue]
            self._state = None
        while True:
            batch = next(self._iterator)
            if self._source.accepts(batch):
                if self._skip_count == 0:
                    break
                self._skip_count -= 1
        has_state = hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")
        # A copy, as the loader may change its state object in place.
        return batch, copy.deepcopy(self._iterator.get_state()) if has_state else None  # pyright: ignore


@atexit.register
def _stop_all() -> None:
    prefetchers = list(_PREFETCHERS)
    for each in prefetchers:
        each.stop()
    deadline = time.monotonic() + EXIT_WAIT_S
    for each in prefetchers:
        each.join(max(0.0, deadline - time.monotonic()))
