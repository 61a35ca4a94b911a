"""A cell that ends at the first call of its step: a dry run prepares it there, a comparison takes the arguments. Or one
that goes on with the step that its first call has decided on."""

from collections.abc import Callable
from typing import Any


class Stopped(BaseException):
    """Ends the cell of a dry run; no `except Exception` of the user's is to catch it."""


class Rehearsal:
    """Stands in a sharded step's place: called as the step it prepares that one, and raises Stopped."""

    calls = 0

    def __init__(self, sharded: Any):
        self.__wrapped__ = sharded.__wrapped__
        self.report = sharded.report
        self.sharded = sharded
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.sharded.prepare(*args, **kwargs)
        self.arguments = args, kwargs
        raise Stopped


class Awaited:
    """Stands in the step's place: keeps the arguments of its first call, and raises Stopped."""

    def __init__(self, function: Any):
        self.__wrapped__ = function
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs
        raise Stopped


class Deciding:
    """Stands in the step's place: the arguments of the first call decide on the `step` that this and all later calls
    are of. `decide(args, kwargs)` may raise Stopped."""

    def __init__(self, function: Any, decide: Callable[[tuple[Any, ...], dict[str, Any]], Any]):
        self.__wrapped__, self._decide = function, decide
        self.step: Any = None

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.step is None:
            self.step = self._decide(args, kwargs)
        return self.step(*args, **kwargs)
