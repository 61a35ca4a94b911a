"""Copies: of a call's arguments, so that running the step changes none of the user's objects; and of a sharded step,
which are what those of a function are."""

import copy
import sys
import types
from typing import TYPE_CHECKING, Any

import jax

from ..introspect import is_a, static_attribute
from ..program.unwrap import is_jitted

if TYPE_CHECKING:
    from .sharded import ShardedStep


def copies(arguments: Any) -> Any:
    """`arguments` in new containers and NNX objects; arrays are the same ones, which no step takes over."""
    if nnx := sys.modules.get("flax.nnx"):
        nodes = jax.tree.leaves(arguments, is_leaf=nnx.graph.is_graph_node)
        if any(map(nnx.graph.is_graph_node, nodes)):
            return nnx.clone(arguments)
    return jax.tree.map(lambda leaf: leaf, arguments)


class Copied:
    """What copying and pickling a sharded step gives, and an object that holds one: what it gives of a function."""

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copied(self, memo)  # pyright: ignore[reportArgumentType]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self)  # pyright: ignore[reportArgumentType]


def copied(step: "ShardedStep", memo: dict[int, Any]) -> "ShardedStep":
    """A deep copy, as of a function: the step itself. That of a method is the method of the copied object, sharded in
    the same way; so are partials and objects that are called."""
    plain = step.__wrapped__
    if is_jitted(plain) or is_a(plain, types.FunctionType):
        return step
    made = type(step)(copy.deepcopy(plain, memo), step.request)
    made.path, made.cell, made.compile_limit = step.path, step.cell, step.compile_limit
    return made


def reduced(step: "ShardedStep") -> Any:
    """What pickle is given of a step. Where its own name leads to it that name, as of a function; else, and where
    cloudpickle takes what notebooks define by value, the plain step: a compiled program goes nowhere."""
    module = getattr(step, "__module__", None)
    found: Any = sys.modules.get(module) if isinstance(module, str) else None
    name: str = static_attribute(step, "__qualname__", "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is step and not (module == "__main__" and _is_by_value()):
        return name
    return _plain, (step.__wrapped__,)


def _plain(step: Any) -> Any:
    return step


def _is_by_value() -> bool:
    """Return whether a pickler asks that sends functions of a notebook as code: cloudpickle, or dill."""
    frame = sys._getframe()
    while frame is not None:
        if {"cloudpickle", "dill"} & {*frame.f_globals.get("__name__", "").split(".")}:
            return True
        frame = frame.f_back
    return False
