"""A save in progress, awaited in a thread of its own so that hosts learn meanwhile of a failure on another host."""

import threading
from collections.abc import Callable
from typing import Any

from ..coordination import LOOK_S, NamedBarriers

LEAVE_S = 10.0  # seconds for Orbax's threads to end after `cancel`


class PendingSave:
    """Save in progress.

    Args:
        manager: Orbax's manager, which is writing from now on.
        passage: Barriers of the hosts during the save; None with one process.
        then: Called once Orbax has written; a part of the save.
    """

    def __init__(self, manager: Any, passage: NamedBarriers | None, then: Callable[[], object]):
        self._manager, self._passage, self._then = manager, passage, then
        self._error: BaseException | None = None
        # `Thread.join` would not do: in Python 3.11 an interrupted join marks the running thread as ended.
        self._over = threading.Event()
        threading.Thread(target=self._run, name="jaxshard checkpoint", daemon=True).start()

    def is_over(self, seconds: float | None) -> bool:
        """Return whether the save ends within `seconds`, written or failed; None for no limit."""
        return self._over.wait(seconds)

    def wait(self) -> None:
        """Wait until the save is written. An interrupt ends the wait, not the save.

        Raises the save's own error, and ProcessFailed if another host's part failed.
        """
        while not self.is_over(None if self._passage is None else LOOK_S):
            if self._passage is not None:
                self._passage.raise_if_failed()
        if self._error is not None:
            raise self._error

    def cancel(self) -> bool:
        """Cancel a save that has failed here or on another host. Return whether Orbax's threads end within 10 s."""
        if not self.is_over(0) and (cancel := getattr(self._manager, "_checkpointer", None)) is not None:
            # Orbax's threads would wait 600 s for files of host 0 that never come.
            cancel.cancel()
        return self.is_over(LEAVE_S)

    def _run(self) -> None:
        """Wait for Orbax and call `then`; keep an error for `wait`."""
        try:
            self._manager.wait_until_finished()
            self._then()
        except BaseException as error:  # raised by `wait`
            self._error = error
        finally:
            self._over.set()
