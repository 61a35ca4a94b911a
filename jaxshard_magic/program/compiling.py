"""XLA in threads of its own, for which an interrupt of the user does not wait."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

from jax._src import api
from jax.stages import Compiled, Lowered

from ..meanwhile import TICK_S, tick
from ..temporary import Unfinished
from .lines import lines_kept

jit: Any = api.jit  # jax.jit may be another: Equinox's, which lowers nothing, under EQX_ON_ERROR=breakpoint


@contextmanager
def compilers(most: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads to compile in, as many as there are cores, or `most`.

    Where the body raises, nothing more begins, and what is being compiled is left to itself: XLA can't be stopped.
    """
    pool = ThreadPoolExecutor(most or os.cpu_count(), "jaxshard compile")
    with Unfinished(partial(pool.shutdown, wait=False, cancel_futures=True)) as work:
        yield pool
        pool.shutdown()
        work.finished()


def compile_apart(lowered: Lowered) -> Compiled:
    """As `compile_lowered`, in a thread for it alone."""
    with compilers(1) as pool:
        return awaited(pool.submit(compile_lowered, lowered))


def awaited(compiled: Future[Compiled]) -> Compiled:
    """The program that another thread compiles; this one does meanwhile what `meanwhile` has for it."""
    while not wait([compiled], TICK_S).done:
        tick()
    return compiled.result()


def compile_lowered(lowered: Lowered) -> Compiled:
    """The program of the devices that it was lowered for, which tells the user's lines."""
    with lines_kept():
        return lowered.compile()
