"""A call's arguments so that running the step changes none of the user's objects."""

import sys
from typing import Any

import jax


def copies(arguments: Any) -> Any:
    """`arguments` in new containers and NNX objects; arrays are the same ones, which no step takes over."""
    if nnx := sys.modules.get("flax.nnx"):
        nodes = jax.tree.leaves(arguments, is_leaf=nnx.graph.is_graph_node)
        if any(map(nnx.graph.is_graph_node, nodes)):
            return nnx.clone(arguments)
    return jax.tree.map(lambda leaf: leaf, arguments)
