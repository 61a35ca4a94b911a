"""Calls with another result or effect each time, made once by a trace: clocks, prints, files, random generators."""

import builtins
import io
import random
import time
from typing import Any

import numpy as np

from ...introspect import is_a

PRINT = "prints"
CLOCK = "reads the clock"
FILES = "opens files or asks for input"

_EFFECTS_BY_ID: dict[int, tuple[Any, str]] = {
    id(function): (function, does)
    for does, functions in {
        PRINT: (builtins.print,),
        FILES: (builtins.open, builtins.input),
        CLOCK: (
            *(time.time, time.time_ns, time.perf_counter, time.perf_counter_ns),
            *(time.monotonic, time.monotonic_ns, time.process_time),
        ),
    }.items()
    for function in functions
}


def effect_of(function: Any) -> str | None:
    """Return the effect of a function that a trace has only once, in words; None for other functions.

    >>> effect_of(print), effect_of(len)
    ('prints', None)
    """
    # By id, so that neither `__hash__` nor `__eq__` of a user's object runs.
    known, text = _EFFECTS_BY_ID.get(id(function), (None, None))
    return text if known is function else None


def generator_of(value: Any) -> Any:
    """Return the random generator that a value is, or draws from; None for other values.

    Known are generators of NumPy and of `random`, bound methods of both, and the modules `random` and `numpy.random`
    themselves, which stand for their global generators.
    """
    if value is random:
        return vars(random)["_inst"]
    if value is np.random:
        return np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
    # Only methods are asked for `__self__`: on another object this could run a user's `__getattr__`.
    owner = getattr(value, "__self__", None) if type(value).__name__ in _METHOD_TYPES else value
    return owner if is_a(owner, (np.random.Generator, np.random.RandomState, random.Random)) else None


_METHOD_TYPES = {"builtin_function_or_method", "method", "cython_function_or_method"}


def generator_state(generator: Any) -> Any:
    """Return the state of a random generator, to be compared by `repr` and given to `set_generator_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    # The legacy form is a tuple with another layout for each kind of bit generator.
    return generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore the state of a random generator."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def is_file(value: Any) -> bool:
    """Return whether an object is an open file: iterable by lines, but usually there to be written."""
    return is_a(value, io.IOBase)
