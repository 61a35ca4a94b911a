"""End a cell that is about to fill the machine's memory."""

import _thread
import signal
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ... import temporary
from ...errors import ShardError
from ...temporary import AcquiredLock, Replaced, TemporaryChange, signal_handler
from ...units import byte_text

GIB = 2**30
# Memory to stay free: bytes, or this share of the machine's memory if that is more.
MIN_FREE_BYTES, SHARE = GIB, 0.1
MIN_GROWTH_BYTES = 2 * GIB  # a cell that has allocated less is not the cause
# `interrupt_main` only runs Python's handler of this signal; the operating system sends nothing.
_SIGNAL: Any = getattr(signal, "SIGUSR2", None)
EVERY, RETRY_SECONDS = (0.05, 0.25)  # seconds between checks, and between two signals

_ENDING = (__file__, temporary.__file__)  # files with code that runs at the end of a cell
_CGROUP = Path("/sys/fs/cgroup")
_FIX = "state = jax.eval_shape(init, key)"


@dataclass(frozen=True)
class MemoryState:
    """Memory in bytes.

    Attributes:
        free: Available to programs.
        total: Size of the machine's or the container's memory.
        mine: Used by this process.
    """

    free: int
    total: int
    mine: int


# A BaseException, so that no `except Exception` of the user catches the end.
class MemoryExhausted(BaseException):
    """Signal that ends the cell."""


class MemoryGuard(TemporaryChange):
    """Context manager that ends its body with a `ShardError` before memory is full.

    Memory counts as full if less than `least` bytes, or less than `share` of all, are free, and if the process has
    grown by more than `grown` bytes since the start. Outside the main thread, and on systems without SIGUSR2, nothing
    is watched.

    Args:
        say: Receives the message once, before the end.
        least: Bytes to stay free.
        share: Share of the memory to stay free, 0 to 1.
        grown: Growth in bytes below which the cell is never ended.
        every: Seconds between checks.
        read: Returns the present memory.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        *,
        least: int = MIN_FREE_BYTES,
        share: float = SHARE,
        grown: int = MIN_GROWTH_BYTES,
        every: float = EVERY,
        read: "Callable[[], MemoryState] | None" = None,
    ):
        self._say, self._least, self._share, self._grown, self._every = say, least, share, grown, every
        self._read = read or memory
        self._ended, self._lock = threading.Event(), threading.RLock()
        self._message: str | None = None
        self._handling: Replaced | None = None
        # Python runs signal handlers in the main thread only, so no other thread can be ended.
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._handling = Replaced(signal_handler(_SIGNAL), self._arrived)

    def apply(self) -> None:
        if self._handling is not None:
            self._start = self._read()
            self._handling.apply()
            threading.Thread(target=self._watch, name="jaxshard room", daemon=True).start()

    def revert(self) -> None:
        if self._handling is not None:
            with AcquiredLock(self._lock):
                # Under the lock, so that no signal is sent once the handler is being removed.
                self._ended.set()
            self._handling.revert()

    def __exit__(self, kind: type | None = None, *error: object) -> None:
        super().__exit__(kind, *error)
        if kind is not None and issubclass(kind, MemoryExhausted):
            raise ShardError(self._message or "", fix=_FIX) from None

    def _arrived(self, number: int, frame: types.FrameType | None) -> None:
        """Raise MemoryExhausted in the main thread."""
        while frame is not None:
            # The cell is ending already, and needs no second exception.
            if frame.f_code.co_filename.startswith(_ENDING):
                return
            frame = frame.f_back
        raise MemoryExhausted

    def _watch(self) -> None:
        """Check memory until the body has ended; signal the main thread while memory is full."""
        wait = self._every
        while not self._ended.wait(wait):
            now = self._read()
            if not self._filling(now):
                continue
            if self._message is None:
                self._message = self._told(now)
                if self._say is not None:
                    self._say(self._message)
            with AcquiredLock(self._lock):
                if not self._ended.is_set():
                    _thread.interrupt_main(_SIGNAL)
            # The user's code may swallow the exception: signal again until the cell ends.
            wait = RETRY_SECONDS

    def _filling(self, now: MemoryState) -> bool:
        """Return whether little memory is free and the cell has allocated much."""
        return now.free < max(self._least, self._share * now.total) and self._allocated(now) > self._grown

    def _allocated(self, now: MemoryState) -> int:
        return now.mine - self._start.mine

    def _told(self, now: MemoryState) -> str:
        """Return the message for the user."""
        return (
            f"this cell has allocated {byte_text(self._allocated(now))} and {byte_text(now.free)} are left: "
            f"build the state as shapes: `{_FIX}`, or nnx.eval_shape"
        )


def memory() -> MemoryState:
    """Return the memory of the machine, or of the container if smaller."""
    machine = _machine()
    limit, used = _cgroup(_CGROUP)
    if limit is None or used is None:
        return machine
    return MemoryState(min(machine.free, max(limit - used, 0)), min(machine.total, limit), machine.mine)


def _machine() -> MemoryState:
    whole = psutil.virtual_memory()
    return MemoryState(whole.available, whole.total, psutil.Process().memory_info().rss)


def _cgroup(place: Path) -> tuple[int | None, int | None]:
    """Return the container's limit and use in bytes, without droppable file caches; None without a container."""
    try:
        limit, used = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
        pairs = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        # `memory.current` includes cached files, which the kernel drops under pressure.
        dropped = next((int(n) for name, n in pairs if name == "inactive_file"), 0)
    except OSError:
        return None, None
    return (None if limit == "max" else int(limit)), used - dropped
