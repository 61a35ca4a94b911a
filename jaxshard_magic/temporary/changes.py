"""`Temporary`: a change that is undone whatever interrupts; several as one, and those of several threads.

Python raises KeyboardInterrupt between any two lines of the main thread: in an `__enter__`, an `__exit__` and a
`finally`, too. So a change is an object whose state says what of it is made:

- `begin` notes what it is about to change before it changes that; `end` undoes what is noted. Either may be
  interrupted, and both may be called at any time, any number of times.
- In a `with` statement a change stands on a stack of its thread from before it begins until it has ended. Who ends,
  ends all that is left above it; who begins, or calls `end_leftovers`, ends first what functions have left there that
  run no more.

Footguns: a `with` statement over a change must not stand in a generator, which seems to have ended while it waits; but
in one that `contextlib.contextmanager` decorates. An `end` that waits may be interrupted, and waits again when it is
called once more.
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Temporary:
    """A change that is undone at the end of a `with` statement, at the latest by the next one.

    A subclass has `begin` and `end`, as this module says. An `end` raises nothing that it would raise again.
    """

    _frame: FrameType | None = None  # the function whose `with` statement this is

    def begin(self) -> None:
        """Make the change; what is made of it already stays."""
        raise NotImplementedError

    def end(self) -> None:
        """Undo what is made of the change."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        end_leftovers()
        try:
            self._frame = _statement(sys._getframe(1))
            _open.changes.append(self)
            self.begin()
            return self
        except BaseException:
            _end(self)
            raise

    def __exit__(self, *error: object) -> bool | None:
        try:
            _end(self)
        except BaseException:
            _end(self)  # where the first time was interrupted
            raise


class Joined(Temporary):
    """Several changes as one; they begin in order and end in reverse."""

    def __init__(self, *changes: Temporary):
        self._changes = changes

    def begin(self) -> None:
        for change in self._changes:
            change.begin()

    def end(self) -> None:
        for change in reversed(self._changes):
            change.end()


class Held(Temporary):
    """A lock (`threading.RLock`) that this thread has; where it waits for none, only while it is `taken`.

    Python's own `with lock` lets it go in a line of its own, before which an interrupt may come.
    """

    def __init__(self, lock: Any, *, waits: bool = True):
        self._lock, self._waits = lock, waits

    @property
    def taken(self) -> bool:
        """Whether this thread has it."""
        return self._lock._is_owned()  # which Python's conditions ask as well

    def begin(self) -> None:
        self._lock.acquire(blocking=self._waits)

    def end(self) -> None:
        while self.taken:
            self._lock.release()


class Shared:
    """A change that several make at once, in any threads: it lasts from the first that begins to the last that ends.
    Called, it gives what one of them begins and ends."""

    def __init__(self, change: Temporary):
        self._change, self._users, self._lock = change, set["_Share"](), threading.RLock()

    def __call__(self) -> "_Share":
        return _Share(self)

    def begin(self, user: "_Share") -> None:
        with Held(self._lock):
            self._users.add(user)
            self._change.begin()

    def end(self, user: "_Share") -> None:
        with Held(self._lock):
            self._users.discard(user)
            if not self._users:
                self._change.end()


class _Share(Temporary):
    def __init__(self, shared: Shared):
        self._shared = shared

    def begin(self) -> None:
        self._shared.begin(self)

    def end(self) -> None:
        self._shared.end(self)


class Unfinished(Temporary):
    """Work that `undo()` undoes at the end, unless it is `finished` by then; that is called once more where it was
    interrupted.

    >>> with Unfinished(lambda: print("undone")) as work:
    ...     pass
    undone
    """

    def __init__(self, undo: Callable[[], object]):
        self._undo, self._begun = undo, False

    def begin(self) -> None:
        self._begun = True

    def finished(self) -> None:
        """There is nothing to undo any more."""
        self._begun = False

    def end(self) -> None:
        if self._begun:
            self._undo()
            self._begun = False


class Opened(Temporary):
    """`it`: what `opening()` gives, which is closed at the end."""

    it: Any

    def __init__(self, opening: Callable[[], Any]):
        self._opening = opening

    def begin(self) -> None:
        self.it = self._opening()

    def end(self) -> None:
        if hasattr(self, "it"):
            self.it.close()


def within(
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator: each call runs within a `context()`.

    What a context manager itself decorates is called by contextlib, whose frame would stand between those of the user.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with context():
                return function(*args, **kwargs)

        return call

    return decorated


class _Open(threading.local):
    """The changes of this thread that have begun, the outermost first."""

    def __init__(self) -> None:
        self.changes: list[Temporary] = []


_open = _Open()


def end_leftovers() -> None:
    """End what functions of this thread have left begun that run no more, as an interrupt came in their ends."""
    changes = _open.changes
    while changes and not _runs(changes[-1]._frame):
        _end_last(changes[-1])


def _end(change: Temporary) -> None:
    """End a change, and first all that began after it."""
    changes = _open.changes
    while any(each is change for each in changes):
        _end_last(changes[-1])


def _end_last(change: Temporary) -> None:
    """End the innermost change, and take it off the stack: but after an interrupt, so that it is ended again."""
    change._frame = sys._getframe()  # where its end makes changes of its own it is none that was left
    try:
        change.end()
    except Exception:
        change._frame = None
        _open.changes.remove(change)
        raise
    change._frame = None
    _open.changes.remove(change)


def _statement(frame: FrameType | None) -> FrameType | None:
    """The function that runs a `with` statement whose `__enter__` is called by `frame`: behind what contextlib makes of
    generators, and behind its stacks. Raises RuntimeError for another generator, which may wait with it open."""
    while frame is not None and (frame.f_code.co_filename == contextlib.__file__ or _of_contextlib(frame)):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_flags & _SUSPENDED:
        raise RuntimeError(
            f"{frame.f_code.co_qualname} can wait in its middle, and must hold no change meanwhile"
        )
    return frame


def _of_contextlib(frame: FrameType) -> bool:
    """Whether contextlib has made a context of this generator."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == contextlib.__file__


def _runs(function: FrameType | None) -> bool:
    """Whether this thread is inside of a function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is function:
            return True
        frame = frame.f_back
    return False
