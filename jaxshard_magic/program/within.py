"""Functions that run within a context of ours, where the traceback of an error shows no frame of Python's own."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def within(
    context: Callable[[], AbstractContextManager[Any]],
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
