"""A compiled program as a function that takes no weak float for a strong one."""

import functools
from collections.abc import Callable
from typing import Any

import jax


class _Strict:
    """Stands for the executable where jax looks at a kind of call for the first time, in Python."""

    def __init__(self, executable: Any, weak: tuple[bool, ...]):
        self._executable, self._weak = executable, weak

    def call(self, *args: Any) -> Any:
        if tuple(jax.typeof(x).weak_type for x in args) != self._weak:
            raise TypeError("weak types differ from those this program was compiled for")
        return self._executable.call(*args)


def strict_call(compiled: Any, weak: tuple[bool, ...]) -> Callable[..., Any]:
    """`compiled` as a function that raises TypeError also where only weak types differ.

    A compiled program takes a weak float for a strong one, where `jax.jit` would make another program with
    other result types. Its C++ cache does tell them apart; what it has not seen comes to `executable.call`,
    once. The names are private: without them the types are looked at in every call.
    """
    try:
        return _in_cpp(compiled, _Strict(compiled._executable, weak))
    except AttributeError:
        return functools.partial(_checked_call, compiled, weak)


def quick_call(compiled: Any) -> Callable[..., Any]:
    """`compiled` as a function that costs microseconds to call, where types are known to be right."""
    try:
        return _in_cpp(compiled, compiled._executable)
    except AttributeError:
        return compiled


def _in_cpp(compiled: Any, executable: Any) -> Callable[..., Any]:
    params = compiled._params._replace(executable=executable)
    # A program with callbacks has no call in C++; in Python it gives its flat outputs, too.
    return compiled._executable.create_cpp_call(params) or (lambda *inputs: compiled.call(params, *inputs)[0])


def _checked_call(compiled: Any, weak: tuple[bool, ...], *inputs: Any) -> Any:
    if tuple(jax.typeof(x).weak_type for x in jax.tree.leaves(inputs)) != weak:
        raise TypeError("weak types differ from those this program was compiled for")
    return compiled(*inputs)
