"""Reject arguments that can be neither traced nor kept as Python values, and say what to pass instead."""

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..errors import ShardError
from ..introspect import is_a, is_iterator, own_attributes
from .cache_keys import cache_key
from .python_state.impure import generator_of
from .unwrap import UnwrappedStep

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def static_key(value: Any, step: UnwrappedStep, name: int | str) -> Hashable:
    """Return a key for a static argument of the user's own jit.

    Args:
        value: The argument.
        step: Step, for the message.
        name: Position or name of the argument, for the message.

    Raises:
        ShardError: The argument is not hashable.
    """
    try:
        hash(value)
    except TypeError:
        raise ShardError(
            f"{step.name}: the static argument {name} is a {type(value).__name__}, which can't be hashed; "
            "pass something hashable, a tuple instead of a list for example"
        ) from None
    return cache_key(value)


def check_leaves(
    step: UnwrappedStep, leaves: Mapping[int, Any], paths: Callable[[], Sequence[str]], is_node: Callable[[Any], bool]
) -> None:
    """Raise ShardError for the first leaf that can be neither traced nor kept as a Python value.

    Args:
        step: Step called.
        leaves: Leaves that are not traced, by position.
        paths: Returns the names of all leaves.
        is_node: Returns whether an object is NNX's. A trainer may hold such objects and pass them to its step.
    """
    for i, value in leaves.items():
        kind = type(value).__name__
        # Numeric arrays are traced, so this array holds objects, text or dates.
        if is_a(value, np.ndarray):
            raise ShardError(
                f"{step.name}: {paths()[i]} is a numpy array of dtype {value.dtype}, which no device can hold; "
                "take it out of the step's arguments"
            )
        if not step.hashes_leaves and is_iterator(value):
            name = paths()[i]
            raise ShardError(
                f"{step.name}: {name} is a {kind}, and a compiled step would take the same from it in every call; take "
                f"it outside, batch = next({name}), and pass that"
            )
        if not step.hashes_leaves and generator_of(value) is not None:
            raise ShardError(
                f"{step.name}: {paths()[i]} is a {kind}, and a compiled step would draw the same from it in every "
                "call; draw outside and pass the numbers, or pass a key and use jax.random"
            )
        # For an object bound to a step (`self` of a method), `python_state` tracks all that the code reads of it.
        is_bound = not step.jitted and any(value is each for each in step.bound)
        if not is_bound and has_array_attributes(value, is_node):
            raise ShardError(
                f"{step.name}: {paths()[i]} is a {kind}, which jax does not know as a pytree, so that its "
                "arrays can't be sharded; register it, or pass its arrays",
                fix=f"jax.tree_util.register_dataclass({kind})" if is_dataclass(type(value)) else None,
            )
        try:
            cache_key(value)
        except TypeError:
            raise ShardError(
                f"{step.name}: {paths()[i]} is a {kind}, neither an array nor hashable; pass its arrays, or "
                "make it hashable"
            ) from None


def check_result_value(step: UnwrappedStep, value: Any) -> None:
    """Raise ShardError for an object in a step's result that is no pytree and has tracers among its attributes."""
    if is_a(value, _PLAIN):
        return
    if any(is_a(x, Tracer) for x in jax.tree.leaves(list(own_attributes(value).values()))):
        kind = type(value).__name__
        raise ShardError(
            f"{step.name} returns an object of {kind}, which jax does not know as a pytree, so that its arrays can't "
            "be given back; register it, or return its arrays",
            fix=f"jax.tree_util.register_dataclass({kind})" if is_dataclass(type(value)) else None,
        )


def has_array_attributes(value: Any, is_node: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether an object that is no pytree has arrays among its attributes, not counting arrays of NNX objects.

    Args:
        value: Any object; False for classes, modules and functions.
        is_node: Returns whether an object is NNX's.
    """
    if is_a(value, (type, types.ModuleType)) or (callable(value) and not is_dataclass(type(value))):
        return False
    leaves = jax.tree.leaves(list(own_attributes(value).values()), is_leaf=is_node)
    return any(is_a(x, _ARRAYS) and not is_node(x) for x in leaves)
