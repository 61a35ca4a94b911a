"""Name the scalars returned by a step: the loss, and every scalar outside of the state."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, KeyPath

from ..compilation.compiled_step import CompiledStep
from ..compilation.completion_probe import outputs_getter
from ..program.trace import path_name

LOSS = "loss"


class ReturnedScalars(NamedTuple):
    """Scalars returned by a program.

    Attributes:
        names: Names, the loss first.
        pick: Takes the scalars' arrays from the program's results.
    """

    names: tuple[str, ...]
    pick: Callable[[Any], Sequence[Any]]


def returned_scalars(entry: CompiledStep) -> ReturnedScalars:
    """Return the scalars that calls of `entry` return.

    Among them are the loss (for the losses of an epoch, the last) and scalars of float or integer dtype, except next
    values of inputs and values written into the step's arguments. The name has the keys and attributes on the path,
    `eval.acc`, without positions in tuples; or is the whole path, if several names would be equal or there is none.
    """
    loss, avals = entry.plan.loss, entry.traced.closed.out_avals
    paths, written = entry.traced.out_paths, set(entry.traced.in_paths)
    positions = [] if loss is None else [loss]
    for o, aval in enumerate(avals):
        number = isinstance(aval.dtype, np.dtype) and (
            jnp.issubdtype(aval.dtype, jnp.floating) or jnp.issubdtype(aval.dtype, jnp.integer)
        )
        if number and not aval.shape and o != loss and o not in entry.plan.state_pairs and paths[o] not in written:
            positions.append(o)
    names = [_name(paths[o]) or (LOSS if o == loss else "") for o in positions]
    # Values are recorded by name, so equal names would overwrite each other.
    name_counts = Counter(names)
    unique = (
        name if name and name_counts[name] == 1 else path_name(paths[o]).partition(".")[2] or path_name(paths[o])
        for name, o in zip(names, positions, strict=True)
    )
    return ReturnedScalars(tuple(unique), outputs_getter(entry, positions))


def _name(path: KeyPath) -> str:
    """Return the keys and attributes of an output's path, without positions: `train.loss`."""
    keys = (key.key if isinstance(key, DictKey) else getattr(key, "name", None) for key in path[1:])
    return ".".join(key for key in keys if isinstance(key, str))
