"""Call compiled programs fast, and without accepting a weak float for a strong float."""

import functools
from collections.abc import Callable
from typing import Any

import jax


class _StrictExecutable:
    """Stand-in for the executable of a compiled program that rejects wrong weak types.

    JAX's C++ fast path calls `call` in Python only for the first call with new argument types.
    """

    def __init__(self, executable: Any, weak: tuple[bool, ...]):
        self._executable, self._weak = executable, weak

    def call(self, *args: Any) -> Any:
        if tuple(jax.typeof(x).weak_type for x in args) != self._weak:
            raise TypeError("weak types differ from those this program was compiled for")
        return self._executable.call(*args)


def strict_call(compiled: Any, weak: tuple[bool, ...]) -> Callable[..., Any]:
    """Return `compiled` as a function that raises TypeError also for arguments that differ in weak types alone.

    A compiled program accepts a weak float for a strong float, although `jax.jit` would compile another program with
    other result types.

    Args:
        compiled: `jax.stages.Compiled`.
        weak: Weak type of each flat input.
    """
    try:
        # JAX's C++ cache does distinguish weak types; types not seen before come to `executable.call`, once. The names
        # are private: without them every call checks its types in Python.
        return _cpp_call(compiled, _StrictExecutable(compiled._executable, weak))
    except AttributeError:
        return functools.partial(_checked_call, compiled, weak)


def unchecked_call(compiled: Any) -> Callable[..., Any]:
    """Return `compiled` as a function that costs microseconds to call; argument types are not checked."""
    try:
        return _cpp_call(compiled, compiled._executable)
    except AttributeError:
        return compiled


def _cpp_call(compiled: Any, executable: Any) -> Callable[..., Any]:
    """Return the C++ call of a compiled program."""
    params = compiled._params._replace(executable=executable)
    # A program with callbacks has no C++ call. The Python call returns a tuple that starts with the outputs.
    return compiled._executable.create_cpp_call(params) or (lambda *inputs: compiled.call(params, *inputs)[0])


def _checked_call(compiled: Any, weak: tuple[bool, ...], *inputs: Any) -> Any:
    """Call a compiled program after a check of weak types in Python."""
    if tuple(jax.typeof(x).weak_type for x in jax.tree.leaves(inputs)) != weak:
        raise TypeError("weak types differ from those this program was compiled for")
    return compiled(*inputs)
