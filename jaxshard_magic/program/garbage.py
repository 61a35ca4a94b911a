"""Python's garbage collector, held off where very many objects are made at once and few of them are garbage."""

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_lock = threading.Lock()
_held = 0  # by so many, in any threads: the last one lets it go on


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which walks through all of a process's objects each time that a quarter is new.

    What no cycle holds is freed as ever. JAX has a function called at each collection, and Python drops an
    interrupt that comes while it runs.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    global _held
    with _lock:
        ours = _held > 0 or gc.isenabled()
        _held += ours
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _held -= ours
            if ours and not _held:
                gc.enable()


def interruptible() -> AbstractContextManager[None]:
    """For a long wait in which an interrupt is to be heard: without collection where this is the main thread, the one
    that Python interrupts."""
    main = threading.current_thread() is threading.main_thread()
    return uncollected() if main else nullcontext()
