"""Make a jit of a sharded step the sharded step of the jit.

Trainers jit one of their methods when they are made or first train: `nnx.jit(self._step)`. JAX would trace the sharded
step as a part of another program, and run it unsharded. Inside the context below, `jax.jit`, `nnx.jit` and
`eqx.filter_jit` call the `rejit` of a sharded step to decide. All other functions are treated as usual, by any import
path.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..introspect import is_a, static_attribute
from ..temporary import TemporaryChange

# Every `jax.jit` calls the first, and every `nnx.jit` one of the next two. The names are private: a replaced `jax.jit`
# would not reach code that has imported the function before.
_MAKERS = (
    ("jax._src.pjit", "make_jit"),
    ("flax.nnx.transforms.compilation", "JitWrapped"),
    ("flax.nnx.transforms.compilation", "SimpleJitWrapped"),
    ("flax.nnx", "cached_partial"),
    ("flax.nnx.graphlib", "cached_partial"),
    ("equinox", "filter_jit"),
    ("equinox._jit", "filter_jit"),
)


class ShardedJits(TemporaryChange):
    """Context in which a jit of a sharded step is sharded itself. A second entry has no effect."""

    def apply(self) -> None:
        for module, name, maker in _jit_makers():
            if not is_a(maker, _ShardingJit):
                setattr(module, name, _ShardingJit(maker))

    def revert(self) -> None:
        for module, name, maker in _jit_makers():
            if is_a(maker, _ShardingJit):
                setattr(module, name, maker.make)


def _jit_makers() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """Yield the functions and classes behind jit in imported modules, with their module and name."""
    for file, name in _MAKERS:
        module = sys.modules.get(file)
        maker = None if module is None else vars(module).get(name)
        if module is not None and maker is not None:
            yield module, name, maker


class _ShardingJit:
    """Replacement for a function or class behind jit; asks a sharded step first.

    Args:
        make: The original.
    """

    def __init__(self, make: Callable[..., Any]):
        functools.update_wrapper(self, make)
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _unwrap_step(args[0]) if args else None
        if found is None:
            return self.make(*args, **kwargs)
        rejit, plain = found
        return rejit(self.make(plain, *args[1:], **kwargs))


def _unwrap_step(function: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return the `rejit` of a sharded step and the plain step; None for other functions.

    Methods and partials of a sharded step are unwrapped; the plain step is wrapped in the same way.
    """
    if is_a(function, types.MethodType):
        inner = _unwrap_step(function.__func__)
        return None if inner is None else (inner[0], types.MethodType(inner[1], function.__self__))
    if is_a(function, functools.partial):
        inner = _unwrap_step(function.func)
        return None if inner is None else (inner[0], functools.partial(inner[1], *function.args, **function.keywords))
    rejit = static_attribute(function, "rejit")
    return None if rejit is None else (rejit, function.__wrapped__)
