"""Values that something has for a while: an attribute, an item, all elements of a list, a signal's handler."""

import signal
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from .changes import Temporary

ABSENT = object()  # the value of a place that has none


@dataclass(frozen=True)
class Place:
    """Something that has a value: `read()` gives it, `write(value)` sets it, `ABSENT` where it is to have none."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


class Kept(Temporary):
    """Whatever becomes of a place's value, it is what it was before at the end."""

    def __init__(self, place: Place):
        self._place, self._noted = place, list[Any]()

    def begin(self) -> None:
        if not self._noted:
            self._noted.append(self._place.read())

    def end(self) -> None:
        if self._noted:
            self._place.write(self._noted[0])
            self._noted.clear()

    @property
    def before(self) -> Any:
        """The value from before the change; only while it lasts."""
        return self._noted[0]


class Replaced(Kept):
    """A place that has another value for a while.

    >>> import os
    >>> with Replaced(item(os.environ, "TZ_OF_A_TEST"), "UTC"):
    ...     os.environ["TZ_OF_A_TEST"]
    'UTC'
    >>> "TZ_OF_A_TEST" in os.environ
    False
    """

    def __init__(self, place: Place, value: Any):
        super().__init__(place)
        self._value = value

    def begin(self) -> None:
        super().begin()
        self._place.write(self._value)


class Wrapped(Kept):
    """A place that has what `wrap` makes of its value for a while."""

    def __init__(self, place: Place, wrap: Callable[[Any], Any]):
        super().__init__(place)
        self._wrap = wrap

    def begin(self) -> None:
        super().begin()
        if self._place.read() is self._noted[0]:
            self._place.write(self._wrap(self._noted[0]))


def attribute(owner: Any, name: str) -> Place:
    """An attribute of an object, a class or a module: of its own, so that it has none where a base class has it."""

    def write(value: Any) -> None:
        if value is not ABSENT:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)

    return Place(lambda: vars(owner).get(name, ABSENT), write)


def item(mapping: MutableMapping[Any, Any], key: Any) -> Place:
    """An item of a mapping."""

    def write(value: Any) -> None:
        if value is not ABSENT:
            mapping[key] = value
        else:
            mapping.pop(key, None)

    return Place(lambda: mapping.get(key, ABSENT), write)


def code_of(function: FunctionType) -> Place:
    """What a function runs, whoever holds it."""

    def write(code: CodeType) -> None:
        function.__code__ = code

    return Place(lambda: function.__code__, write)


def elements(sequence: list[Any]) -> Place:
    """All elements of a list."""

    def write(value: list[Any]) -> None:
        sequence[:] = value

    return Place(lambda: [*sequence], write)


def handler(number: signal.Signals) -> Place:
    """The handler of a signal; for the main thread."""

    def write(value: Any) -> None:
        signal.signal(number, signal.SIG_DFL if value is None else value)

    return Place(lambda: signal.getsignal(number), write)
