"""A save while it is written: waited for in a thread of its own, so that hosts hear meanwhile of one that fails."""

import threading
from collections.abc import Callable
from typing import Any

from ..coordination import LOOK_S, Passage

LEAVE_S = 10.0  # for Orbax's threads to end, once they were told to


class Saving:
    """What `manager`, one of Orbax's, writes from now on. `passage`: what hosts go through meanwhile, None on one
    process; `then()` is called once it is written, and is a part of the save."""

    def __init__(self, manager: Any, passage: Passage | None, then: Callable[[], object]):
        self._manager, self._passage, self._then = manager, passage, then
        self._error: BaseException | None = None
        self._over = threading.Event()  # an interrupted `join` takes a thread for ended in Python 3.11
        threading.Thread(target=self._run, name="jaxshard checkpoint", daemon=True).start()

    def is_over(self, seconds: float | None) -> bool:
        """Whether it is over within so many seconds, written or failed."""
        return self._over.wait(seconds)

    def wait(self) -> None:
        """Wait until it is written. An interrupt ends the waiting, not the save. Raises what it failed by, and
        OtherFailed where another host's part failed."""
        while not self.is_over(None if self._passage is None else LOOK_S):
            if self._passage is not None:
                self._passage.look()
        if self._error is not None:
            raise self._error

    def leave(self) -> bool:
        """Write no more: it has failed here or elsewhere. Whether Orbax's threads have ended."""
        if not self.is_over(0) and (cancel := getattr(self._manager, "_checkpointer", None)) is not None:
            cancel.cancel()  # Orbax's threads wait 600 s for files of the first host, which come no more
        return self.is_over(LEAVE_S)

    def _run(self) -> None:
        try:
            self._manager.wait_until_finished()
            self._then()
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._over.set()
