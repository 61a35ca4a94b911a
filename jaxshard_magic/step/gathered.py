"""State that lies on several devices, or on the stages of a pipeline, brought back to one place."""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from ..errors import ShardError
from ..placing import near, put
from ..program.peel import nnx_calls


def gathered(trees: Sequence[Any], to: Any) -> Any:
    """`trees` with every `jax.Array` on `to`, a device or a Sharding. One tree is given back as it is, several as a
    tuple. Modules and optimizers of Flax NNX are changed in place; of its states and Variables new ones are given back.

    Raises `ShardError` where there is nothing to gather.
    """
    if not trees:
        raise ShardError("gather() takes what the step gave back: state = step.gather(state)")
    moved = [_moved(tree, near(to)) for tree in trees]
    return moved[0] if len(moved) == 1 else tuple(moved)


def _moved(tree: Any, to: Any) -> Any:
    is_object = nnx_calls().is_object if "flax.nnx" in sys.modules else None
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_object)
    places = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    for i, x in zip(places, put([leaves[i] for i in places], to), strict=True):
        leaves[i] = x
    if is_object is not None:
        for x in leaves:
            if is_object(x):
                nnx_calls().move(x, lambda arrays: put(arrays, to))
    return structure.unflatten(leaves)
