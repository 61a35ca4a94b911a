"""JAX's settings of one thread, as places whose values are replaced or kept for a while.

JAX's own contexts (`jax.set_mesh`, a trace, a name scope) restore what they change in Python, where an interrupt may
come between. What a thread traces is therefore run in `undisturbed`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any

from jax._src import config, core, mesh, source_info_util  # JAX has no public form of a setting of one thread

from ..temporary import Kept, Place, Replaced

_unset: Any = config.config_ext.unset
_NO_SOURCE = source_info_util.new_source_info()
traceback_of_equation: ContextVar[Any] = ContextVar("traceback_of_equation", default=None)  # that is emitted


def setting(state: Any) -> Place:
    """The value that a setting of JAX has in this thread."""

    def write(value: Any) -> None:
        state.set_local(value)
        if (told := getattr(state, "_update_thread_local_hook", None)) is not None:
            told(None if value is _unset else value)

    return Place(state.get_local, write)


def replaced(state: Any, value: Any) -> Replaced:
    """A setting of JAX that has another value in this thread for a while."""
    parse = getattr(state, "_parser", None)
    return Replaced(setting(state), value if parse is None else parse(value))


def undisturbed() -> Kept:
    """Whatever becomes of the contexts of JAX that are entered inside, the thread leaves as it came. 20 us."""
    return Kept(_THREAD)


class Entered(Kept):
    """Contexts of JAX that each of these makes, as one whose end no interrupt prevents."""

    def __init__(self, *contexts: Callable[[], AbstractContextManager[Any]]):
        super().__init__(_THREAD)
        self._contexts = contexts

    def begin(self) -> None:
        super().begin()
        for context in self._contexts:
            context().__enter__()


def leave_traces() -> None:
    """End what JAX traces in this thread, where an interrupt has left it: for a moment when nothing is traced."""
    core.reset_trace_state()
    _write_source(_NO_SOURCE, None)


@cache
def _states() -> tuple[Any, ...]:
    kind = config.config_ext.Config
    found = [x for module in (config, core, mesh) for x in vars(module).values() if isinstance(x, kind)]
    return tuple({id(x): x for x in (*config.config_states.values(), *found)}.values())


def _read() -> tuple[Any, ...]:
    source = source_info_util._source_info_context.context
    return source, traceback_of_equation.get(), *(state.get_local() for state in _states())


def _write(before: tuple[Any, ...]) -> None:
    source, traceback, *values = before
    _write_source(source, traceback)
    for state, value in zip(_states(), values, strict=True):
        if state.get_local() is not value:
            setting(state).write(value)


def _write_source(source: Any, traceback: Any) -> None:
    source_info_util._source_info_context.context = source
    traceback_of_equation.set(traceback)


_THREAD = Place(_read, _write)
