"""Calls that no interrupt leaves half done."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")


def run_uninterrupted(work: Callable[[], _R]) -> _R:
    """Run `work()` in a thread of its own, and return its result.

    No interrupt reaches the thread: an interrupt of the caller is raised once the work is done.
    """
    results: list[_R] = []
    errors: list[BaseException] = []
    started: list[bool] = []
    start_signal: queue.SimpleQueue[bool] = queue.SimpleQueue()
    finished = threading.Lock()

    def run() -> None:
        if not start_signal.get():
            return
        try:
            results.append(work())
        except BaseException as error:  # raised in the waiting thread
            errors.append(error)
        finished.release()

    finished.acquire()
    try:
        threading.Thread(target=run, name="jaxshard work", daemon=True).start()
        # An interrupt before this line stops the work before it begins; after it the work runs to its end.
        started.append(True)
        start_signal.put(True)
        with finished:
            pass
    except KeyboardInterrupt:
        start_signal.put(bool(started))
        while started and not (results or errors):
            with contextlib.suppress(KeyboardInterrupt), finished:
                pass
        raise
    if errors:
        raise errors[0]
    return results[0]
