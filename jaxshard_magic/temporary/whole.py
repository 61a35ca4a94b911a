"""Work that no interrupt leaves in its middle."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_R = TypeVar("_R")


def done_whole(work: Callable[[], _R]) -> _R:
    """What `work()` gives, in a thread of its own, which no interrupt reaches: one that comes meanwhile is raised when
    the work is done."""
    given: list[_R] = []
    failed: list[BaseException] = []
    decided: list[bool] = []
    go: queue.SimpleQueue[bool] = queue.SimpleQueue()
    over = threading.Lock()

    def run() -> None:
        if not go.get():
            return
        try:
            given.append(work())
        except BaseException as error:  # raised in the thread that waits
            failed.append(error)
        over.release()

    over.acquire()
    try:
        threading.Thread(target=run, name="jaxshard work", daemon=True).start()
        decided.append(True)
        go.put(True)
        with over:
            pass
    except KeyboardInterrupt:
        go.put(bool(decided))
        while decided and not (given or failed):
            with contextlib.suppress(KeyboardInterrupt), over:
                pass
        raise
    if failed:
        raise failed[0]
    return given[0]
