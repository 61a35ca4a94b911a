"""Compilation by XLA in worker threads, so that an interrupt by the user need not wait for XLA."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

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
