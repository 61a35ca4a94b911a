"""A cell that is about to fill the machine's memory is ended while there is room left."""

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
from ...temporary import Held, Replaced, Temporary, handler
from ...units import byte_text

GIB = 2**30
# What has to stay free: bytes, or this share of the machine's memory where that is more.
LEAST, SHARE = GIB, 0.1
GROWN = 2 * GIB  # bytes; a cell that has allocated less is not what fills the machine
_SIGNAL: Any = getattr(
    signal, "SIGUSR2", None
)  # raised inside Python alone, for the handler that it finds there
EVERY, AGAIN = 0.05, 0.25  # seconds between looks, and from one interrupt to the next where code swallowed it

_ENDING = (
    __file__,
    str(Path(temporary.__file__).parent),
)  # whose functions end it, or other changes of the cell's
_CGROUP = Path("/sys/fs/cgroup")
_FIX = "state = jax.eval_shape(init, key)"


@dataclass(frozen=True)
class Memory:
    """Bytes: what programs can still get of the `total` of this machine or container, and what this process has."""

    free: int
    total: int
    mine: int


class Full(BaseException):
    """Ends the cell; no `except Exception` of the user's is to catch it."""


class Room(Temporary):
    """A context that ends what runs in it with a `ShardError` before the memory is full.

    It ends once less than `least` bytes, or `share` of all, are free and this process has grown by `grown` bytes.
    `say` is then called with the message, once. `read` gives the Memory. Python lets nothing but the main thread be
    ended so: in others, and where there is no SIGUSR2, nothing is watched.
    """

    def __init__(
        self,
        say: Callable[[str], None] | None = None,
        *,
        least: int = LEAST,
        share: float = SHARE,
        grown: int = GROWN,
        every: float = EVERY,
        read: "Callable[[], Memory] | None" = None,
    ):
        self._say, self._least, self._share, self._grown, self._every = say, least, share, grown, every
        self._read = read or memory
        self._ended, self._lock = threading.Event(), threading.RLock()
        self._message: str | None = None
        self._handling: Replaced | None = None
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._handling = Replaced(handler(_SIGNAL), self._arrived)

    def begin(self) -> None:
        if self._handling is not None:
            self._start = self._read()
            self._handling.begin()
            threading.Thread(target=self._watch, name="jaxshard room", daemon=True).start()

    def end(self) -> None:
        if self._handling is not None:
            with Held(self._lock):
                self._ended.set()
            self._handling.end()

    def __exit__(self, kind: type | None = None, *error: object) -> None:
        super().__exit__(kind, *error)
        if kind is not None and issubclass(kind, Full):
            raise ShardError(self._message or "", fix=_FIX) from None

    def _arrived(self, number: int, frame: types.FrameType | None) -> None:
        """The main thread is told; what it does may be the end of the cell itself, which needs no ending."""
        while frame is not None:
            if frame.f_code.co_filename.startswith(_ENDING):
                return
            frame = frame.f_back
        raise Full

    def _watch(self) -> None:
        wait = self._every
        while not self._ended.wait(wait):
            now = self._read()
            if not self._filling(now):
                continue
            if self._message is None:
                self._message = self._told(now)
                if self._say is not None:
                    self._say(self._message)
            with Held(self._lock):
                if not self._ended.is_set():
                    _thread.interrupt_main(_SIGNAL)
            wait = AGAIN

    def _filling(self, now: Memory) -> bool:
        return now.free < max(self._least, self._share * now.total) and self._allocated(now) > self._grown

    def _allocated(self, now: Memory) -> int:
        return now.mine - self._start.mine

    def _told(self, now: Memory) -> str:
        return (
            f"this cell has allocated {byte_text(self._allocated(now))} and {byte_text(now.free)} are left: "
            f"build the state as shapes: `{_FIX}`, or nnx.eval_shape"
        )


def memory() -> Memory:
    """The machine's memory, or the container's where that has less."""
    machine = _machine()
    limit, used = _cgroup(_CGROUP)
    if limit is None or used is None:
        return machine
    return Memory(min(machine.free, max(limit - used, 0)), min(machine.total, limit), machine.mine)


def _machine() -> Memory:
    whole = psutil.virtual_memory()
    return Memory(whole.available, whole.total, psutil.Process().memory_info().rss)


def _cgroup(place: Path) -> tuple[int | None, int | None]:
    """The limit of this container and what it uses, without the files it could drop; None where there is none."""
    try:
        limit, used = (place / "memory.max").read_text().strip(), int((place / "memory.current").read_text())
        pairs = (line.split() for line in (place / "memory.stat").read_text().splitlines())
        dropped = next((int(n) for name, n in pairs if name == "inactive_file"), 0)
    except OSError:
        return None, None
    return (None if limit == "max" else int(limit)), used - dropped
