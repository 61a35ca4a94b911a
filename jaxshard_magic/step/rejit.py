"""A jit of a sharded step is the sharded step of the jit.

Trainers jit a method of theirs themselves, when they are made or when they first train: `nnx.jit(self._step)`. Were
that left to JAX, the step would be traced as a part of another program, and run plain in it. So meanwhile `jax.jit`,
`nnx.jit` and `eqx.filter_jit` ask the step that they are given what to make of it (`rejit`); all other functions they
treat as ever, however they are imported.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from ..introspect import is_a, static_attribute
from ..temporary import Temporary

# All of `jax.jit` comes to the first; all of `nnx.jit` to the next two. Private names: JAX and Flax have no public
# place that functions imported before come to as well.
_MAKERS = (
    ("jax._src.pjit", "make_jit"),
    ("flax.nnx.transforms.compilation", "JitWrapped"),
    ("flax.nnx.transforms.compilation", "SimpleJitWrapped"),
    ("flax.nnx", "cached_partial"),
    ("flax.nnx.graphlib", "cached_partial"),
    ("equinox", "filter_jit"),
    ("equinox._jit", "filter_jit"),
)


class Rejits(Temporary):
    """A context in which a jit of a sharded step is sharded itself; entered twice it is entered once."""

    def begin(self) -> None:
        for module, name, maker in _makers():
            if not is_a(maker, _Maker):
                setattr(module, name, _Maker(maker))

    def end(self) -> None:
        for module, name, maker in _makers():
            if is_a(maker, _Maker):
                setattr(module, name, maker.make)


def _makers() -> Iterator[tuple[types.ModuleType, str, Any]]:
    """What makes jits now, with its module and its name there; of modules that are imported."""
    for file, name in _MAKERS:
        module = sys.modules.get(file)
        maker = None if module is None else vars(module).get(name)
        if module is not None and maker is not None:
            yield module, name, maker


class _Maker:
    """What makes jits, and asks a sharded step first."""

    def __init__(self, make: Callable[..., Any]):
        functools.update_wrapper(self, make)
        self.make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _step_in(args[0]) if args else None
        if found is None:
            return self.make(*args, **kwargs)
        rejit, plain = found
        return rejit(self.make(plain, *args[1:], **kwargs))


def _step_in(function: Any) -> tuple[Callable[[Any], Any], Any] | None:
    """Return what takes the jit of a sharded step, which a function is, as a method or a partial, too; and the same of
    the plain step."""
    if is_a(function, types.MethodType):
        found = _step_in(function.__func__)
        return None if found is None else (found[0], types.MethodType(found[1], function.__self__))
    if is_a(function, functools.partial):
        found = _step_in(function.func)
        return (
            None
            if found is None
            else (found[0], functools.partial(found[1], *function.args, **function.keywords))
        )
    rejit = static_attribute(function, "rejit")
    return None if rejit is None else (rejit, function.__wrapped__)
