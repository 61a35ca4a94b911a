"""Python's garbage collector, held off where very many objects are made at once and few of them are garbage."""

import gc
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..temporary import Place, Replaced, Shared

_held_off = Shared(Replaced(Place(gc.isenabled, lambda on: gc.enable() if on else gc.disable()), False))


def uncollected() -> AbstractContextManager[Any]:
    """Without garbage collection, which walks through all of a process's objects each time that a quarter is new.

    What no cycle holds is freed as ever. JAX has a function called at each collection, and Python drops an
    interrupt that comes while it runs.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    return _held_off()


def interruptible() -> AbstractContextManager[Any]:
    """For a long wait in which an interrupt is to be heard: without collection where this is the main thread, the one
    that Python interrupts."""
    main = threading.current_thread() is threading.main_thread()
    return uncollected() if main else nullcontext()
