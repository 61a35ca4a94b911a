"""The numbers that a step returns, by name: its loss, and every scalar that is no part of its state."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

from ..program.trace import path_name
from .sign import picker_of_all

if TYPE_CHECKING:
    from .entry import Entry

LOSS = "loss"


class Returned(NamedTuple):
    """`names` of the numbers, the loss first, and `pick`, which takes their arrays from what the program gave."""

    names: tuple[str, ...]
    pick: Callable[[Any], Sequence[Any]]


def returned_by(entry: "Entry") -> Returned:
    """The numbers that calls of `entry` return.

    The loss, of an epoch's losses the last; and scalars of a float or integer dtype that are not the next value of an
    input, nor written into the step's arguments. A number is named by the keys and attributes that lead to it,
    `eval.acc`, without the positions in tuples; by its whole path where several would be called alike, or it has no
    name.
    """
    loss, avals = entry.plan.loss, entry.traced.closed.out_avals
    paths, written = entry.traced.out_paths, set(entry.traced.in_paths)
    places = [] if loss is None else [loss]
    for o, aval in enumerate(avals):
        number = isinstance(aval.dtype, np.dtype) and (
            jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, jnp.integer)
        )
        if (
            number
            and not aval.shape
            and o != loss
            and o not in entry.plan.state_pairs
            and paths[o] not in written
        ):
            places.append(o)
    names = [_name(paths[o]) or (LOSS if o == loss else "") for o in places]
    alike = Counter(names)
    unique = (
        name if name and alike[name] == 1 else path_name(paths[o]).partition(".")[2] or path_name(paths[o])
        for name, o in zip(names, places, strict=True)
    )
    return Returned(tuple(unique), picker_of_all(entry, places))


def _name(path: KeyPath) -> str:
    """`train.loss`: the keys and attributes of an output's path, without its positions."""
    keys = (key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:])
    return ".".join(key for key in keys if isinstance(key, str))
