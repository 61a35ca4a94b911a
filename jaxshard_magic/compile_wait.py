"""Work for a thread that waits for a compiler, due after a wait of some seconds."""

import threading
import time
from collections.abc import Callable

from .temporary import Replaced, attribute

TICK_S = 0.1  # seconds between two calls of `tick`
_thread = threading.local()  # attribute `due`: the work to run, where there is any


class Once:
    """Function called at most once, by the first call after `after_s` seconds."""

    def __init__(self, do: Callable[[], None], after_s: float):
        self._do: Callable[[], None] | None = do
        self._at = time.monotonic() + after_s

    def __call__(self) -> None:
        if self._do is not None and time.monotonic() >= self._at:
            # Cleared first, as `do` may wait for a compiler itself, and get here again.
            do, self._do = self._do, None
            do()


def while_compiling(do: Callable[[], None], after_s: float) -> Replaced:
    """Return a context in which this thread calls `do` once, when it waits for a compiler.

    The wait lasts until `do` has ended, and raises its error.

    Args:
        do: The function.
        after_s: Seconds before the call.
    """
    return Replaced(attribute(_thread, "due"), Once(do, after_s))


def tick() -> None:
    """Run the due work of this thread. Code that waits for a compiler calls this every `TICK_S` seconds."""
    if (due := getattr(_thread, "due", None)) is not None:
        due()
