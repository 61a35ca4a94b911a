"""Stand-ins for the sharded step: end the cell at the step's first call, or choose the step there."""

import types
from collections.abc import Callable
from typing import Any


# A BaseException, so that no `except Exception` of the user catches the end.
class CellStopped(BaseException):
    """Signal that ends the cell at the first call of its step: of a dry run, a comparison, or a search with no step to
    run."""


class StandIn:
    """Object bound in place of a step; becomes a method if bound in a class, as the step would.

    Attributes:
        calls: Number of calls.
        rejit: Makes the object to bind in place of a jit of the stand-in; None for the jit itself.
    """

    calls = 0
    rejit: Callable[[Any], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        return self if obj is None else types.MethodType(self, obj)


class DryRunStep(StandIn):
    """Stand-in for a dry run: the first call prepares the sharded step and ends the cell.

    Args:
        sharded: Step to prepare.

    Attributes:
        arguments: `(args, kwargs)` of the call; None before.
    """

    def __init__(self, sharded: Any):
        self.__wrapped__ = sharded.__wrapped__
        self.report = sharded.report
        self.sharded = sharded
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.sharded.prepare(*args, **kwargs)
        self.arguments = args, kwargs
        raise CellStopped


class ArgumentCapture(StandIn):
    """Stand-in that keeps the arguments of the first call and ends the cell.

    Args:
        function: Plain step.

    Attributes:
        arguments: `(args, kwargs)` of the call; None before.
    """

    def __init__(self, function: Any):
        self.__wrapped__ = function
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.arguments = args, kwargs
        raise CellStopped


class DeferredStep(StandIn):
    """Stand-in whose first call chooses the step for all calls.

    Args:
        function: Plain step.
        decide: Returns the step for the arguments of the first call; may raise CellStopped.

    Attributes:
        step: Chosen step; None before the first call.
    """

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
