"""A jit of a sharded step is the sharded step of the jit.

Trainers jit a method of theirs themselves, when they are made or when they first train: `nnx.jit(self._step)`. Were
that left to JAX, the step would be traced as a part of another program, and run plain in it. So meanwhile `jax.jit`,
`nnx.jit` and `eqx.filter_jit` ask the step that they are given what to make of it (`rejit`); all other functions they
treat as ever, however they are imported.
"""

import functools
import sys
import types
from collections.abc import Callable
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

    def __init__(self) -> None:
        self._own: dict[tuple[str, str], tuple[Any, Any]] = {}  # what was there, and what is there instead

    def begin(self) -> None:
        for place in _MAKERS:
            module, name = sys.modules.get(place[0]), place[1]
            maker = None if module is None else vars(module).get(name)
            if maker is not None and not is_a(maker, _Maker):
                self._own[place] = maker, _Maker(maker)
                setattr(module, name, self._own[place][1])

    def end(self) -> None:
        for (module, name), (before, ours) in list(self._own.items()):
            if vars(sys.modules[module]).get(name) is ours:
                setattr(sys.modules[module], name, before)
            self._own.pop((module, name), None)


class _Maker:
    """What makes jits, and asks a sharded step first."""

    def __init__(self, make: Callable[..., Any]):
        functools.update_wrapper(self, make)
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _step_in(args[0]) if args else None
        if found is None:
            return self._make(*args, **kwargs)
        rejit, plain = found
        return rejit(self._make(plain, *args[1:], **kwargs))


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
