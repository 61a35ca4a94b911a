"""Compilation by XLA in worker threads, and fast calls of compiled programs.

In a worker thread XLA need not be waited for when the user interrupts. A call of a compiled program is fast, and
doesn't accept a weak float for a strong float.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from jax._src import api
from jax.stages import Compiled, Lowered

from ..compile_wait import TICK_S, tick
from ..temporary import UndoUnlessFinished
from .source_lines import full_source_locations

jit: Any = api.jit  # not `jax.jit`: Equinox replaces it under EQX_ON_ERROR=breakpoint, and can't lower then


@contextmanager
def compile_pool(max_workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Open a thread pool for compilations.

    An exception in the body cancels compilations that have not begun; running ones continue in the background.

    Args:
        max_workers: Number of threads; None for one per core.
    """
    pool = ThreadPoolExecutor(max_workers or os.cpu_count(), "jaxshard compile")
    # XLA can't be stopped, so after an exception nothing waits for compilations that are running.
    with UndoUnlessFinished(partial(pool.shutdown, wait=False, cancel_futures=True)) as work:
        yield pool
        pool.shutdown()
        work.mark_finished()


def compile_in_thread(lowered: Lowered) -> Compiled:
    """Compile `lowered` in a thread of its own, as `compile_lowered` does."""
    with compile_pool(1) as pool:
        return await_compiled(pool.submit(compile_lowered, lowered))


def await_compiled(future: Future[Compiled]) -> Compiled:
    """Wait for a program compiled by another thread, and return the program.

    Functions registered with `while_compiling` run on the waiting thread.
    """
    while not wait([future], TICK_S).done:
        tick()
    return future.result()


def compile_lowered(lowered: Lowered) -> Compiled:
    """Compile `lowered` for the devices of its lowering, with source locations of the user's lines."""
    with full_source_locations():
        return lowered.compile()


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
        return partial(_checked_call, compiled, weak)


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
