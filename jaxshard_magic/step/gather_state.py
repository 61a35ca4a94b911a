"""Gather sharded state, also from the stages of a pipeline, onto one device or sharding."""

import sys
from collections.abc import Sequence
from typing import Any

import jax

from ..device_arrays import local_placement, put
from ..errors import ShardError
from ..program.flatten_call import nnx_objects


def gather_state(trees: Sequence[Any], to: Any) -> Any:
    """Return pytrees with every `jax.Array` moved to one place.

    Modules and optimizers of Flax NNX are changed in place. NNX states and Variables are replaced by new ones.

    Args:
        trees: State as returned by the step.
        to: Device or Sharding.

    Returns:
        The tree itself for one tree, a tuple for several.

    Raises:
        ShardError: `trees` is empty.
    """
    if not trees:
        raise ShardError("gather() takes what the step gave back: state = step.gather(state)")
    moved = [_move_arrays(tree, local_placement(to)) for tree in trees]
    return moved[0] if len(moved) == 1 else tuple(moved)


def _move_arrays(tree: Any, to: Any) -> Any:
    """Return a pytree with every `jax.Array` moved to `to`."""
    # Without an import of flax.nnx no state has NNX objects, and the import would be slow.
    is_object = nnx_objects().is_object if "flax.nnx" in sys.modules else None
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_object)
    positions = [i for i, x in enumerate(leaves) if isinstance(x, jax.Array)]
    for i, x in zip(positions, put([leaves[i] for i in positions], to), strict=True):
        leaves[i] = x
    if is_object is not None:
        for x in leaves:
            if is_object(x):
                nnx_objects().move_arrays(x, lambda arrays: put(arrays, to))
    return structure.unflatten(leaves)
