"""Changes to values: an attribute, an item, all elements of a list, a signal's handler."""

import signal
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from .changes import TemporaryChange

ABSENT = object()  # stands for a value that does not exist


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
