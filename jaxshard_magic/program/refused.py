"""Arguments of a step that can be neither traced nor held: which one, and what to pass instead."""

import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from ..errors import ShardError
from ..introspect import is_a, is_iterator, own_attributes
from .held import held_key
from .python_state.impure import generator_of
from .unwrap import Step

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def static_key(value: Any, step: Step, name: int | str) -> Hashable:
    """Return a key for an argument that the user's own jit holds. Raises ShardError for one that has no hash."""
    try:
        hash(value)
    except TypeError:
        raise ShardError(
            f"{step.name}: the static argument {name} is a {type(value).__name__}, which can't be hashed; "
            "pass something hashable, a tuple instead of a list for example"
        ) from None
    return held_key(value)


def refuse(
    step: Step,
    held: Mapping[int, Any],
    paths: Callable[[], Sequence[str]],
    is_node: Callable[[Any], bool],
) -> None:
    """Raise ShardError for the first of the leaves `held` that can be neither traced nor held. `paths()` names all;
    `is_node` says whether an object is of NNX, which a trainer may keep and hand to its step."""
    for i, value in held.items():
        kind = type(value).__name__
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
        # of an object that the step is a method of, what it reads in each call is known
        own = not step.jitted and any(value is each for each in step.bound)
        if not own and holds_arrays(value, is_node):
            raise ShardError(
                f"{step.name}: {paths()[i]} is a {kind}, which jax does not know as a pytree, so that its "
                "arrays can't be sharded; register it, or pass its arrays",
                fix=f"jax.tree_util.register_dataclass({kind})" if is_dataclass(type(value)) else None,
            )
        try:
            held_key(value)
        except TypeError:
            raise ShardError(
                f"{step.name}: {paths()[i]} is a {kind}, neither an array nor hashable; pass its arrays, or "
                "make it hashable"
            ) from None


def refuse_result(step: Step, value: Any) -> None:
    """Raise ShardError for an object in a step's result that is no pytree and has arrays of the trace."""
    if is_a(value, _PLAIN):
        return
    if any(is_a(x, Tracer) for x in jax.tree.leaves(list(own_attributes(value).values()))):
        kind = type(value).__name__
        raise ShardError(
            f"{step.name} returns an object of {kind}, which jax does not know as a pytree, so that its arrays can't "
            "be given back; register it, or return its arrays",
            fix=f"jax.tree_util.register_dataclass({kind})" if is_dataclass(type(value)) else None,
        )


def holds_arrays(value: Any, is_node: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether an object that is no pytree has arrays among its attributes, those of NNX objects aside."""
    if is_a(value, (type, types.ModuleType)) or (callable(value) and not is_dataclass(type(value))):
        return False
    leaves = jax.tree.leaves(list(own_attributes(value).values()), is_leaf=is_node)
    return any(is_a(x, _ARRAYS) and not is_node(x) for x in leaves)
