"""The arrays in any value: a pytree, an NNX object, or one of them alone."""

import sys
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath

from .peel import nnx_calls
from .trace import path_name


def arrays_in(value: Any, root: KeyPath = ()) -> list[tuple[str, Any]]:
    """The arrays and shapes in `value`, each with its path from `root` on; what is no array is left out.

    >>> import jax.numpy as jnp
    >>> [path for path, _ in arrays_in({"w": jnp.ones(3), "step": 2})]
    ['w']
    """
    found: list[tuple[str, Any]] = []
    flat, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_node)
    for path, x in flat:
        above = (*root, *path)
        if _is_node(x):
            nodes = nnx_calls().open_nodes([x], [above])
            rows = nnx_calls().described(nodes, [False])
            found += [
                (path_name(inner), leaf) for (inner, _, _), leaf in zip(rows, nodes.leaves(), strict=True)
            ]
        elif isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.generic)) or _numeric(x):
            found.append((path_name(above), x))
    return found


def _is_node(x: Any) -> bool:
    return "flax.nnx" in sys.modules and nnx_calls().is_node(x)


def _numeric(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm"


def plain_tree(value: Any) -> Any:
    """`value` with nested dicts of arrays for NNX objects and states, and values for Variables."""
    if "flax.nnx" not in sys.modules:
        return value
    calls = nnx_calls()
    return jax.tree.map(
        lambda x: calls.as_dicts(x) if calls.has_arrays(x) else x, value, is_leaf=calls.has_arrays
    )
