"""What stands in the place of JAX's own functions while a thread traces a step, and no longer."""

import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import jax
from jax._src import (  # jax.grad, nnx and equinox all reach `api.vjp`; nothing here has a
    ad_checkpoint,
    api,
    pjit,
)
from jax._src.interpreters import partial_eval  # public form
from jax._src.lax.control_flow.loops import associative_scan

Vjp = Callable[..., Any]  # jax.vjp, or what stands in its place while a step is traced
Scan = Callable[..., Any]  # the same for jax.lax.associative_scan

_config: Any = jax.config
_VJP = ((api, "vjp"), (jax, "vjp"))
# In JAX 0.10 and 0.12 all that traces a function (jit, scan, while, cond, checkpoint, shard_map, custom rules) asks
# the first of these caches, by its name in its module; two more lie before it. They hold a jaxpr until its function
# dies, which those of jax.numpy never do, the first without a limit.
_CACHES = (
    (partial_eval, "trace_to_jaxpr"),
    (pjit, "_infer_params_cached"),
    (ad_checkpoint, "_trace_to_jaxpr"),
)
_tracing = jax.make_user_context(
    None
)  # one for all: each that is made becomes part of the keys of JAX's caches
_epoch = itertools.count(1)
# `associative_scan` has another code while a step is traced: whoever imported it by name, and the derivative rules of
# JAX's own running products and maxima, hold the function itself. The second one keeps JAX's code.
_jax_scan = inspect.unwrap(associative_scan)
_own_scan = FunctionType(_jax_scan.__code__, _jax_scan.__globals__, argdefs=_jax_scan.__defaults__)


def _traced_scan(fn, elems, reverse=False, axis=0):  # runs among the names of JAX's module
    from jaxshard_magic.program.hooks import dispatched_scan

    return dispatched_scan(fn, elems, reverse, axis)


def dispatched_scan(*args: Any) -> Any:
    """`jax.lax.associative_scan`, or what the calling thread has in its place."""
    return _own_scan(*args) if _mine.scan is None else _mine.scan(*args)


class _Mine(threading.local):
    """What this thread traces with: `vjp` and `scan` in the place of JAX's, and functions by those that they stand for;
    `looks_for_leaks`: whether the user's own code is to be looked at for leaked tracers, and nothing else."""

    vjp: Vjp | None = None
    scan: Scan | None = None
    looks_for_leaks: bool = False
    stand_ins: dict[Callable[..., Any], Callable[..., Any]] | None = None


_mine = _Mine()


class _Forgetting:
    """A cache of JAX that knows what a thread traces by stand-ins: what it holds of them dies with them."""

    def __init__(self, cache: Any):
        self._cache = cache

    def __call__(self, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        stand_ins = _mine.stand_ins
        if stand_ins is not None:
            stand_in = functools.partial(fun)
            # What is kept here would be a leak of the tracers that the function closes over.
            fun = stand_in if _config.jax_check_tracer_leaks else stand_ins.setdefault(fun, stand_in)
        return self._cache(fun, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _dispatching(inner: Vjp) -> Vjp:
    """`inner`, or what the calling thread has in its place."""

    @functools.wraps(inner)
    def vjp(*args: Any, **options: Any) -> Any:
        return (_mine.vjp or inner)(*args, **options)

    return vjp


class _Hooks:
    """JAX's functions replaced from the first thread that begins to trace to the last that ends, in any order.

    `vjp`: JAX's own.
    """

    vjp: Vjp

    def __init__(self):
        self._lock, self._users, self._originals = threading.Lock(), 0, []

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self.vjp = api.vjp
            hooks: dict[tuple[Any, str], Any] = {place: _dispatching(self.vjp) for place in _VJP}
            hooks |= {(module, name): _Forgetting(getattr(module, name)) for module, name in _CACHES}
            hooks[_jax_scan, "__code__"] = _traced_scan.__code__
            self._originals = [(module, name, getattr(module, name)) for module, name in hooks]
            for (module, name), hook in hooks.items():
                setattr(module, name, hook)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for module, name, original in self._originals:
                    setattr(module, name, original)


_hooks = _Hooks()


@contextmanager
def anew() -> Iterator[None]:
    """Inside, this thread traces jits that already ran anew, and JAX's caches forget at the end what it traced.

    Entries that the session made itself stay.
    """
    outer, epoch = _mine.stand_ins, next(_epoch)
    with _hooks, _tracing(epoch):
        _mine.stand_ins = {}
        try:
            yield
        finally:
            _mine.stand_ins = outer


@contextmanager
def gradients_by(seen: Callable[[Vjp], Vjp]) -> Iterator[None]:
    """While this thread traces, its gradient calls, in jits that already ran too, are made with `seen(jax.vjp)`."""
    with anew():
        outer = _mine.vjp
        _mine.vjp = seen(outer or _hooks.vjp)
        try:
            yield
        finally:
            _mine.vjp = outer


@contextmanager
def scans_by(seen: Callable[[Scan], Scan]) -> Iterator[None]:
    """While this thread traces, associative scans, in jits that already ran too, are made with
    `seen(jax.lax.associative_scan)`."""
    with anew():
        outer = _mine.scan
        _mine.scan = seen(outer or _own_scan)
        try:
            yield
        finally:
            _mine.scan = outer


@contextmanager
def retracing() -> Iterator[None]:
    """Inside, JAX looks for leaked tracers in what `users_own` holds alone, where it is to look for any: what is traced
    again of a step keeps tracers for a while, and to look takes it seconds each time."""
    if not _config.jax_check_tracer_leaks:
        yield
        return
    with jax.check_tracer_leaks(False):
        outer, _mine.looks_for_leaks = _mine.looks_for_leaks, True
        try:
            yield
        finally:
            _mine.looks_for_leaks = outer


def users_own() -> AbstractContextManager[Any]:
    """A context in which the user's own code is traced."""
    return jax.check_tracer_leaks(True) if _mine.looks_for_leaks else nullcontext()
