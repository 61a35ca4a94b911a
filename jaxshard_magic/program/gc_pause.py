"""Pauses of Python's garbage collector, where very many objects are created at once and few are garbage."""

import gc
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..temporary import Accessor, Replaced, SharedChange

_pause = SharedChange(Replaced(Accessor(gc.isenabled, lambda on: gc.enable() if on else gc.disable()), False))


def gc_paused() -> AbstractContextManager[Any]:
    """Pause garbage collection inside the context; objects without reference cycles are freed as ever.

    A collection walks through all objects of the process each time that a quarter of them is new. JAX has a function
    called at each collection, and Python drops an interrupt that arrives while the function runs.

    >>> with gc_paused():
    ...     gc.isenabled()
    False
    """
    return _pause()


def interruptible() -> AbstractContextManager[Any]:
    """Let interrupts through during a long wait: pause garbage collection on the main thread, do nothing on others."""
    # Python delivers interrupts to the main thread only.
    main = threading.current_thread() is threading.main_thread()
    return gc_paused() if main else nullcontext()
