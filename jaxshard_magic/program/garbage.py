"""Python's garbage collector, held off where very many objects are made at once and few of them are garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection, which walks through all of a process's objects each time that a quarter is new.

    What no cycle holds is freed as ever. JAX has a function called at each collection, and Python drops an
    interrupt that comes while it runs.

    >>> with uncollected():
    ...     gc.isenabled()
    False
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
