"""Arrays inside any value: a pytree, an NNX object, or a single array."""

import sys
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath

from .flatten_call import nnx_objects
from .trace import path_name


def arrays_with_paths(value: Any, root: KeyPath = ()) -> list[tuple[str, Any]]:
    """Return the arrays and shapes in `value` with their paths; other leaves are left out.

    Args:
        value: A pytree, an NNX object or a single array.
        root: Key path put in front of every path.

    Returns:
        Pairs of path name and `jax.Array`, `jax.ShapeDtypeStruct`, NumPy scalar or numeric NumPy array.

    >>> import jax.numpy as jnp
    >>> [path for path, _ in arrays_with_paths({"w": jnp.ones(3), "step": 2})]
    ['w']
    """
    pairs: list[tuple[str, Any]] = []
    flat, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_node)
    for path, x in flat:
        prefix = (*root, *path)
        if _is_node(x):
            nodes = nnx_objects().open_nodes([x], [prefix])
            rows = nnx_objects().describe_leaves(nodes, [False])
            pairs += [(path_name(inner), leaf) for (inner, _, _), leaf in zip(rows, nodes.leaves(), strict=True)]
        elif isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.generic)) or _numeric(x):
            pairs.append((path_name(prefix), x))
    return pairs


def _is_node(x: Any) -> bool:
    """Return whether `x` is an NNX graph node."""
    # Before flax.nnx is imported no value can be NNX's, and the test alone must not import flax.
    return "flax.nnx" in sys.modules and nnx_objects().is_node(x)


def _numeric(x: Any) -> bool:
    """Return whether `x` is a NumPy array of numbers or booleans, not of objects, text, bytes or times."""
    return isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm"


def to_plain_tree(value: Any) -> Any:
    """Return `value` with NNX objects and states as nested dicts of arrays, and Variables as their values."""
    if "flax.nnx" not in sys.modules:
        return value
    calls = nnx_objects()
    return jax.tree.map(lambda x: calls.to_dicts(x) if calls.has_arrays(x) else x, value, is_leaf=calls.has_arrays)
