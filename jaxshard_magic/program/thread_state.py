"""Override or preserve JAX settings of the current thread, safely under interrupts.

JAX's own contexts (`jax.set_mesh`, a trace, a name scope) restore their changes in Python, where KeyboardInterrupt may
arrive in between. Tracing therefore runs inside of `preserve_thread_state`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any

from jax._src import config, core, mesh, source_info_util  # no public equivalents

from ..temporary import Accessor, Replaced, Restored

_unset: Any = config.config_ext.unset
_NO_SOURCE = source_info_util.new_source_info()
# JAX's traceback of the equation that an emitter is running.
traceback_of_equation: ContextVar[Any] = ContextVar("traceback_of_equation", default=None)


def thread_setting(state: Any) -> Accessor:
    """Return the value of a JAX setting in this thread, as a place to read and write."""

    def write(value: Any) -> None:
        state.set_local(value)
        # As in JAX's own contexts: for some settings the hook copies the value to jit's C++ state.
        if (hook := getattr(state, "_update_thread_local_hook", None)) is not None:
            hook(None if value is _unset else value)

    return Accessor(state.get_local, write)


def override_setting(state: Any, value: Any) -> Replaced:
    """Return a context that gives a JAX setting another value in this thread.

    Args:
        state: Setting, as in `jax._src.config`.
        value: Value, parsed as JAX parses it.
    """
    parse = getattr(state, "_parser", None)
    return Replaced(thread_setting(state), value if parse is None else parse(value))


def preserve_thread_state() -> Restored:
    """Return a context that restores all of JAX's state of this thread.

    Holds whatever happens to JAX contexts entered inside. Cost: 20 us.
    """
    return Restored(_THREAD)


class JaxContexts(Restored):
    """Several JAX contexts as a single context, whose exit no interrupt prevents.

    Args:
        contexts: Functions that return a JAX context each.
    """

    def __init__(self, *contexts: Callable[[], AbstractContextManager[Any]]):
        super().__init__(_THREAD)
        self._contexts = contexts

    def apply(self) -> None:
        super().apply()
        for context in self._contexts:
            # Never exited: the thread's earlier state is written back instead.
            context().__enter__()


def reset_tracing() -> None:
    """Reset JAX's tracing state in this thread after an interrupt; only for a moment when nothing is traced."""
    core.reset_trace_state()
    _write_source_info(_NO_SOURCE, None)


@cache
def _jax_settings() -> tuple[Any, ...]:
    """Return all JAX settings with a value per thread."""
    kind = config.config_ext.Config
    settings = [x for module in (config, core, mesh) for x in vars(module).values() if isinstance(x, kind)]
    return tuple({id(x): x for x in (*config.config_states.values(), *settings)}.values())


def _read_thread_state() -> tuple[Any, ...]:
    """Return all of JAX's state of this thread."""
    source = source_info_util._source_info_context.context
    return source, traceback_of_equation.get(), *(state.get_local() for state in _jax_settings())


def _write_thread_state(before: tuple[Any, ...]) -> None:
    """Restore what `_read_thread_state` returned."""
    source, traceback, *values = before
    _write_source_info(source, traceback)
    for state, value in zip(_jax_settings(), values, strict=True):
        if state.get_local() is not value:
            thread_setting(state).write(value)


def _write_source_info(source: Any, traceback: Any) -> None:
    source_info_util._source_info_context.context = source
    traceback_of_equation.set(traceback)


_THREAD = Accessor(_read_thread_state, _write_thread_state)
