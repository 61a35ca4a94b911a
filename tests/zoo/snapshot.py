"""All the numbers that a call left behind: what it returned, and what it changed in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from .registry import Call


def numbers(call: Call, result: Any) -> dict[str, np.ndarray]:
    """The numbers of the result and of the NNX objects among the arguments: `result.0.w`, `model.linear.kernel`.

    Keys come as their uint32 data and bfloat16 as float32; functions and other leaves are left out.
    """
    trees = {"result": result}
    trees |= {name: x for name, x in call.arguments().items() if _changes_in_place(x)}
    leaves = [(_name(path), x) for path, x in tree_flatten_with_path(trees)[0] if _is_number(x)]
    by_name = {name: _as_numpy(x) for name, x in leaves}
    assert len(by_name) == len(leaves) > 0, "names must differ"
    return by_name


def _changes_in_place(tree: Any) -> bool:
    def whole(x: Any) -> bool:
        return isinstance(x, nnx.Pytree | nnx.Variable | nnx.State)

    return any(whole(x) and not isinstance(x, nnx.State) for x in jax.tree.leaves(tree, is_leaf=whole))


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator=".").removesuffix(".value")


def _is_number(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def _as_numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x
