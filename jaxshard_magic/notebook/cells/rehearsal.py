"""A cell that ends at the first call of its step: a dry run prepares it there, a comparison takes the arguments. Or one
that goes on with the step that its first call has decided on."""

import types
from collections.abc import Callable
from typing import Any


class Stopped(BaseException):
    """Ends the cell of a dry run; no `except Exception` of the user's is to catch it."""


class StandIn:
    """What stands in a step's place: a method of an object where a class has it, as the step would be."""

    calls = 0
    rejit: Callable[[Any], Any] | None = None  # what is to be made of a jit of it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)


class Rehearsal(StandIn):
    """Stands in a sharded step's place: called as the step it prepares that one, and raises Stopped."""

    def __init__(self, sharded: Any):
        self.__wrapped__ = sharded.__wrapped__
        self.report = sharded.report
        self.sharded = sharded
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.sharded.prepare(*args, **kwargs)
        self.arguments = args, kwargs
        raise Stopped


class Awaited(StandIn):
    """Stands in the step's place: keeps the arguments of its first call, and raises Stopped."""

    def __init__(self, function: Any):
        self.__wrapped__ = function
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs
        raise Stopped


class Deciding(StandIn):
    """Stands in the step's place: the arguments of the first call decide on the `step` that this and all later calls
    are of. `decide(args, kwargs)` may raise Stopped."""

    def __init__(self, function: Any, decide: Callable[[tuple[Any, ...], dict[str, Any]], Any]):
        self.__wrapped__, self._decide = function, decide
        self.step: Any = None

    @property
    def calls(self) -> int:
        return 0 if self.step is None else self.step.calls

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.step is None:
            self.step = self._decide(args, kwargs)
        return self.step(*args, **kwargs)
