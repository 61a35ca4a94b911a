"""Temporary changes to the process, a thread or an object, that an interrupt at any line can't leave behind.

Python raises KeyboardInterrupt between any two lines of the main thread, also in `__enter__`, `__exit__` and
`finally`. A change is therefore an object whose state says how far it got:

- `apply` notes what it will change before it changes it, and `revert` undoes what is noted. Either may be interrupted,
  and both may be called at any time, any number of times.
- A change used by `with` is on its thread's stack from before it begins until it has ended. Reverting a change first
  reverts all above it. Starting a change, or `end_abandoned`, first reverts changes left by functions that no longer
  run.

`Replaced` and `Restored` change a value: an attribute, an item, all elements of a list, a signal's handler. What can't
be undone runs whole, in `run_uninterrupted`.

Footguns:
- Don't put a `with` statement over a change in a generator, which seems to have ended while it waits, except in one
  decorated by `contextlib.contextmanager`.
- A `revert` that waits may be interrupted, and waits again when called again.
"""

import contextlib
import functools
import inspect
import queue
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, ParamSpec, Self, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

# Code flags of functions that can wait in their middle.
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
ABSENT = object()  # stands for a value that does not exist


class TemporaryChange:
    """Change undone at the end of a `with` statement, or at the latest by the next one.

    Subclasses define `apply` and `revert`, as the module describes. `revert` raises nothing that it would raise again.
    """

    _frame: FrameType | None = None  # of the function with the `with` statement

    def apply(self) -> None:
        """Make the change; what is made of it already stays."""
        raise NotImplementedError

    def revert(self) -> None:
        """Undo what is made of the change."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        end_abandoned()
        try:
            self._frame = _with_statement_frame(sys._getframe(1))
            # Before `apply`, so that a change that was interrupted in it is found and reverted.
            _active.changes.append(self)
            self.apply()
            return self
        except BaseException:
            _revert_through(self)
            raise

    def __exit__(self, *error: object) -> bool | None:
        try:
            _revert_through(self)
        except BaseException:
            # An interrupt may have come in the middle of the first revert: a second one finishes it.
            _revert_through(self)
            raise


class ChangeGroup(TemporaryChange):
    """Several changes as one: applied in order, reverted in reverse."""

    def __init__(self, *changes: TemporaryChange):
        self._changes = changes

    def apply(self) -> None:
        for change in self._changes:
            change.apply()

    def revert(self) -> None:
        for change in reversed(self._changes):
            change.revert()


class AcquiredLock(TemporaryChange):
    """Lock (`threading.RLock`) held by this thread for a while.

    Args:
        lock: The lock.
        waits: False to take it only if it is free; `is_acquired` says whether it was.
    """

    def __init__(self, lock: Any, *, waits: bool = True):
        self._lock, self._waits = lock, waits

    @property
    def is_acquired(self) -> bool:
        """True while this thread holds the lock."""
        return self._lock._is_owned()  # no public equivalent; `threading.Condition` calls it, too

    def apply(self) -> None:
        self._lock.acquire(blocking=self._waits)

    def revert(self) -> None:
        # Python's own `with lock` releases in a line of its own, before which an interrupt may come.
        while self.is_acquired:
            self._lock.release()


class SharedChange:
    """Change made by several users at once, in any threads: it lasts from the first `apply` to the last `revert`.

    Called, it returns one use of the change.

    Args:
        change: The change to share.
    """

    def __init__(self, change: TemporaryChange):
        self._change, self._users, self._lock = change, set["_SharedUse"](), threading.RLock()

    def __call__(self) -> "_SharedUse":
        """Return one use of the change."""
        return _SharedUse(self)

    def add_user(self, user: "_SharedUse") -> None:
        with AcquiredLock(self._lock):
            self._users.add(user)
            self._change.apply()

    def remove_user(self, user: "_SharedUse") -> None:
        with AcquiredLock(self._lock):
            self._users.discard(user)
            if not self._users:
                self._change.revert()


class _SharedUse(TemporaryChange):
    def __init__(self, shared: SharedChange):
        self._shared = shared

    def apply(self) -> None:
        self._shared.add_user(self)

    def revert(self) -> None:
        self._shared.remove_user(self)


class UndoUnlessFinished(TemporaryChange):
    """Work that `undo()` reverts at the end, unless it is marked finished; an interrupted `undo` is called once more.

    Args:
        undo: Reverts the work.

    >>> with UndoUnlessFinished(lambda: print("undone")) as work:
    ...     pass
    undone
    """

    def __init__(self, undo: Callable[[], object]):
        self._undo, self._is_pending = undo, False

    def apply(self) -> None:
        self._is_pending = True

    def mark_finished(self) -> None:
        """Declare that there is nothing to undo any more."""
        self._is_pending = False

    def revert(self) -> None:
        if self._is_pending:
            self._undo()
            self._is_pending = False


class OpenResource(TemporaryChange):
    """Resource opened by `opening()` and closed at the end.

    Args:
        opening: Opens the resource and returns it.
    """

    resource: Any

    def __init__(self, opening: Callable[[], Any]):
        self._opening = opening

    def apply(self) -> None:
        self.resource = self._opening()

    def revert(self) -> None:
        if hasattr(self, "resource"):
            self.resource.close()


def run_in_context(
    context: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that runs each call in a `context()`.

    A context manager's own decorator is called by contextlib, whose frame would stand between the user's frames.

    Args:
        context: Makes the context manager of one call.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            with context():
                return function(*args, **kwargs)

        return call

    return decorated


class _ActiveChanges(threading.local):
    """Changes of this thread that have begun, outermost first."""

    def __init__(self) -> None:
        self.changes: list[TemporaryChange] = []


_active = _ActiveChanges()


def end_abandoned() -> None:
    """Revert changes of this thread whose functions no longer run: an interrupt came while they were reverted."""
    changes = _active.changes
    while changes and not _is_running(changes[-1]._frame):
        _revert_innermost(changes[-1])


def _revert_through(change: TemporaryChange) -> None:
    """Revert a change, after everything that began later."""
    changes = _active.changes
    while any(each is change for each in changes):
        _revert_innermost(changes[-1])


def _revert_innermost(change: TemporaryChange) -> None:
    """Revert the innermost change and take it off the stack; an interrupted one stays there, to be reverted again."""
    # `revert` may start changes of its own, which first revert abandoned ones: this one must count as running.
    change._frame = sys._getframe()
    try:
        change.revert()
    # An interrupt is no Exception: the change stays on the stack.
    except Exception:
        change._frame = None
        _active.changes.remove(change)
        raise
    change._frame = None
    _active.changes.remove(change)


def _with_statement_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the function whose `with` statement calls `__enter__` from `frame`.

    Frames of contextlib, and of generators that contextlib decorates, are skipped.

    Raises:
        RuntimeError: The function is any other generator or coroutine, which may wait with the change open.
    """
    while frame is not None and (frame.f_code.co_filename == contextlib.__file__ or _is_called_by_contextlib(frame)):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_flags & _SUSPENDED:
        raise RuntimeError(f"{frame.f_code.co_qualname} can wait in its middle, and must hold no change meanwhile")
    return frame


def _is_called_by_contextlib(frame: FrameType) -> bool:
    """Return whether contextlib has made a context of this generator."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == contextlib.__file__


def _is_running(function: FrameType | None) -> bool:
    """Return whether this thread is inside of `function`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame is function:
            return True
        frame = frame.f_back
    return False


@dataclass(frozen=True)
class Accessor:
    """Read and write access to a value.

    Attributes:
        read: Returns the value, `ABSENT` for none.
        write: Sets the value; `ABSENT` removes it.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]


class Restored(TemporaryChange):
    """Change that restores a value, whatever becomes of it in between.

    Args:
        accessor: Access to the value.
    """

    def __init__(self, accessor: Accessor):
        self._accessor, self._original_values = accessor, list[Any]()

    def apply(self) -> None:
        # Called again after an interrupt, `read` may return the changed value.
        if not self._original_values:
            self._original_values.append(self._accessor.read())

    def revert(self) -> None:
        if self._original_values:
            self._accessor.write(self._original_values[0])
            self._original_values.clear()

    @property
    def original(self) -> Any:
        """Value from before the change, available only while it lasts."""
        return self._original_values[0]


class Replaced(Restored):
    """Change that replaces a value.

    Args:
        accessor: Access to the value.
        value: The other value.

    >>> import os
    >>> with Replaced(item(os.environ, "TZ_OF_A_TEST"), "UTC"):
    ...     os.environ["TZ_OF_A_TEST"]
    'UTC'
    >>> "TZ_OF_A_TEST" in os.environ
    False
    """

    def __init__(self, accessor: Accessor, value: Any):
        super().__init__(accessor)
        self._value = value

    def apply(self) -> None:
        super().apply()
        self._accessor.write(self._value)


class Wrapped(Restored):
    """Change that puts `wrap(value)` in place of a value.

    Args:
        accessor: Access to the value.
        wrap: Makes the other value of the value.
    """

    def __init__(self, accessor: Accessor, wrap: Callable[[Any], Any]):
        super().__init__(accessor)
        self._wrap = wrap

    def apply(self) -> None:
        super().apply()
        # Called again after an interrupt, the value is not wrapped twice.
        if self._accessor.read() is self._original_values[0]:
            self._accessor.write(self._wrap(self._original_values[0]))


def attribute(owner: Any, name: str) -> Accessor:
    """Return access to an attribute of an object, a class or a module.

    An attribute of a base class counts as `ABSENT`.

    Args:
        owner: The object.
        name: Name of its attribute.
    """

    def write(value: Any) -> None:
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    # `getattr` would find attributes of base classes, and bind methods.
    return Accessor(lambda: vars(owner).get(name, ABSENT), write)


def item(mapping: MutableMapping[Any, Any], key: Any) -> Accessor:
    """Return access to an item of a mapping."""

    def write(value: Any) -> None:
        if value is not ABSENT:
            mapping[key] = value
        else:
            mapping.pop(key, None)

    return Accessor(lambda: mapping.get(key, ABSENT), write)


def function_code(function: FunctionType) -> Accessor:
    """Return access to the code of a function, for every reference to it."""

    def write(code: CodeType) -> None:
        function.__code__ = code

    return Accessor(lambda: function.__code__, write)


def list_elements(sequence: list[Any]) -> Accessor:
    """Return access to all elements of a list."""

    def write(value: list[Any]) -> None:
        sequence[:] = value

    return Accessor(lambda: [*sequence], write)


def signal_handler(number: signal.Signals) -> Accessor:
    """Return access to a signal's handler. Only the main thread may write it."""

    def write(value: Any) -> None:
        # `getsignal` returns None for a handler that Python has not installed, which `signal.signal` refuses.
        signal.signal(number, signal.SIG_DFL if value is None else value)

    return Accessor(lambda: signal.getsignal(number), write)


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
