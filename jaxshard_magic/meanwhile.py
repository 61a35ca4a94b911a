"""What a thread does while it waits for a compiler: something that a wait of some seconds is worth."""

import threading
import time
from collections.abc import Callable

from .temporary import Replaced, attribute

TICK_S = 0.1  # between two calls of `tick`
_thread = threading.local()  # has an attribute `due` where something is to be done


class Once:
    """A function that is called no more than once, by the first `tick` after `after_s` seconds."""

    def __init__(self, do: Callable[[], None], after_s: float):
        self._do: Callable[[], None] | None = do
        self._at = time.monotonic() + after_s

    def __call__(self) -> None:
        if self._do is not None and time.monotonic() >= self._at:
            do, self._do = self._do, None
            do()


def while_compiling(do: Callable[[], None], after_s: float) -> Replaced:
    """Return a context in which this thread calls `do` once, where it waits for a compiler after `after_s` seconds.

    The wait lasts until `do` has ended, and raises what that raises.
    """
    return Replaced(attribute(_thread, "due"), Once(do, after_s))


def tick() -> None:
    """Do what is due in this thread. Whatever waits for a compiler calls it every `TICK_S` seconds."""
    if (due := getattr(_thread, "due", None)) is not None:
        due()
