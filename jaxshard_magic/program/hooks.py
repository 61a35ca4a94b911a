"""Replacements of JAX's own functions on a thread that traces a step, undone when the trace ends."""

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any

import jax
from jax._src import (  # no public equivalents; jax.grad, NNX and Equinox all call `api.vjp`
    ad_checkpoint,
    api,
    pjit,
)
from jax._src.config import check_tracer_leaks
from jax._src.interpreters import partial_eval
from jax._src.lax.control_flow.loops import associative_scan

from ..temporary import ABSENT, ChangeGroup, Replaced, SharedChange, TemporaryChange, Wrapped, attribute, function_code
from .thread_state import override_setting, preserve_thread_state

Vjp = Callable[..., Any]  # `jax.vjp`, or its replacement while a step is traced
Scan = Callable[..., Any]  # `jax.lax.associative_scan`, or its replacement

_config: Any = jax.config
# In JAX 0.10 and 0.12 everything that traces a function (jit, scan, while, cond, checkpoint, shard_map, custom rules)
# looks up the first of these caches, by its name in its module. The other two are asked before it. An entry lives as
# long as its function, hence forever for functions of jax.numpy, and the first cache has no size limit.
_CACHES = ((partial_eval, "trace_to_jaxpr"), (pjit, "_infer_params_cached"), (ad_checkpoint, "_trace_to_jaxpr"))
_tracing: Any = jax.make_user_context(None)  # only one: every user context is part of the keys of JAX's caches
_epoch = itertools.count(1)
# While a step is traced, the code object of `associative_scan` is replaced. A replaced attribute would not be seen by
# modules that imported the function by name, nor by the derivative rules of JAX's cumulative products and maxima. The
# copy `_original_scan` has JAX's code.
_jax_scan = inspect.unwrap(associative_scan)
_original_scan = FunctionType(_jax_scan.__code__, _jax_scan.__globals__, argdefs=_jax_scan.__defaults__)


def _scan_replacement(fn, elems, reverse=False, axis=0):  # runs with the globals of JAX's module, hence the import
    from jaxshard_magic.program.hooks import dispatched_scan

    return dispatched_scan(fn, elems, reverse, axis)


def dispatched_scan(*args: Any) -> Any:
    """Call `jax.lax.associative_scan`, or the calling thread's replacement."""
    return _original_scan(*args) if _thread.scan is None else _thread.scan(*args)


class _ThreadHooks(threading.local):
    """Replacements of the calling thread.

    Attributes:
        vjp: Replacement of `jax.vjp`.
        scan: Replacement of `jax.lax.associative_scan`.
        looks_for_leaks: Whether only the user's own code is checked for leaked tracers.
        stand_ins: Stand-in functions used as cache keys, by the functions that they replace.
    """

    vjp: Vjp | None = None
    scan: Scan | None = None
    looks_for_leaks: bool = False
    stand_ins: dict[Callable[..., Any], Callable[..., Any]] | None = None


_thread = _ThreadHooks()


class _StandInCache:
    """Cache of JAX that sees stand-ins for the functions traced by a thread, so that entries die with the stand-ins."""

    def __init__(self, cache: Any):
        self._cache = cache

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stand_ins = _thread.stand_ins
        if stand_ins is not None:
            stand_in = functools.partial(fun)
            # Under JAX's leak check nothing is stored: a stored function would count as a leak of the tracers that it
            # closes over.
            fun = stand_in if _config.jax_check_tracer_leaks else stand_ins.setdefault(fun, stand_in)
        return self._cache(fun, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _dispatch_vjp(inner: Vjp) -> Vjp:
    """Return `inner` as a function that calls the calling thread's `vjp`, or `inner` without one."""

    @functools.wraps(inner)
    def vjp(*args: Any, **options: Any) -> Any:
        return (_thread.vjp or inner)(*args, **options)

    return vjp


# Installed while any thread traces: several threads may begin and end in any order. One replacement serves all of them;
# each thread looks up its own hooks.
_api_vjp = Wrapped(attribute(api, "vjp"), _dispatch_vjp)
_hooks = SharedChange(
    ChangeGroup(
        _api_vjp,
        Wrapped(attribute(jax, "vjp"), _dispatch_vjp),
        *(Wrapped(attribute(module, name), _StandInCache) for module, name in _CACHES),
        Replaced(function_code(_jax_scan), _scan_replacement.__code__),
    )
)


def _set_thread_hook(name: str, value: Any) -> Replaced:
    """Return the temporary replacement of one attribute of `_ThreadHooks` on this thread."""
    return Replaced(attribute(_thread, name), value)


def trace_afresh() -> TemporaryChange:
    """Have this thread trace jits again, even those that ran before, until the context ends.

    JAX's caches then forget these traces. Entries that the session made itself stay.
    """
    # A user context with a new value changes the keys of JAX's caches, so no earlier trace is found.
    return ChangeGroup(
        preserve_thread_state(),
        _hooks(),
        override_setting(_tracing._obj, next(_epoch)),
        _set_thread_hook("stand_ins", {}),
    )


def hook_vjp(wrap: Callable[[Vjp], Vjp]) -> TemporaryChange:
    """Make the gradient calls of this thread with `wrap(jax.vjp)`, inside jits that already ran too.

    Args:
        wrap: Function from the current `jax.vjp` to its replacement.
    """

    def around(outer: Any) -> Vjp:
        return wrap(_api_vjp.original if outer is ABSENT else outer)

    return ChangeGroup(trace_afresh(), Wrapped(attribute(_thread, "vjp"), around))


def hook_associative_scan(wrap: Callable[[Scan], Scan]) -> TemporaryChange:
    """Make the associative scans of this thread with `wrap(jax.lax.associative_scan)`.

    Scans in jits that already ran are included.

    Args:
        wrap: Function from the current function to its replacement.
    """

    def around(outer: Any) -> Scan:
        return wrap(_original_scan if outer is ABSENT else outer)

    return ChangeGroup(trace_afresh(), Wrapped(attribute(_thread, "scan"), around))


def retrace_context() -> TemporaryChange:
    """Restore the thread's JAX state after code that traces a step, and restrict JAX's check for leaked tracers.

    Where the check is on, only the bodies of `user_code` contexts are checked.
    """
    if not _config.jax_check_tracer_leaks:
        return preserve_thread_state()
    # Retracing refers to tracers of a step for a while, and each check for leaks would take seconds.
    looks = override_setting(check_tracer_leaks, False), _set_thread_hook("looks_for_leaks", True)
    return ChangeGroup(preserve_thread_state(), *looks)


def user_code() -> AbstractContextManager[Any]:
    """Return a context for tracing the user's own code, checked for leaked tracers where the user wants it."""
    return jax.check_tracer_leaks(True) if _thread.looks_for_leaks else nullcontext()
