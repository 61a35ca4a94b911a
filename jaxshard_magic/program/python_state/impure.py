"""Calls that give or do something else each time, which a traced step makes once: clocks, prints, random numbers."""

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

_CALLS: dict[int, tuple[Any, str]] = {
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
    """Return what a function does at each call that a trace does once, in words; None for others.

    >>> effect_of(print), effect_of(len)
    ('prints', None)
    """
    known, text = _CALLS.get(id(function), (None, None))
    return text if known is function else None


def generator_of(value: Any) -> Any:
    """Return the generator of random numbers that a value is, or draws from: NumPy's, those of `random`, and a method
    of either; the module's own for `random` and `numpy.random` themselves. None for others."""
    if value is random:
        return vars(random)["_inst"]
    if value is np.random:
        return np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
    owner = getattr(value, "__self__", None) if type(value).__name__ in _METHODS else value
    return owner if is_a(owner, (np.random.Generator, np.random.RandomState, random.Random)) else None


_METHODS = {"builtin_function_or_method", "method", "cython_function_or_method"}


def state_of(generator: Any) -> Any:
    """Return where a generator of random numbers is, to be compared by `repr`, and to be given back to `set_state`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_state(generator: Any, state: Any) -> None:
    """Have a generator go on from where it was."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def is_file(value: Any) -> bool:
    """Return whether an object is an open file, which iterates over its lines but is there to be written into."""
    return is_a(value, io.IOBase)
