"""All the numbers that a call left behind: what it returned, and what it changed in place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_flatten_with_path

from .registry import Call


def snapshot(call: Call, result: Any) -> list[np.ndarray]:
    """The numbers of the result and of the NNX objects among the arguments, in the order of `names`.

    Keys come as their uint32 data and bfloat16 as float32; functions and other leaves are left out.
    """
    return [x for _, x in _numbers(call, result)]


def names(call: Call, result: Any) -> list[str]:
    """A name for each array of `snapshot`: `result.0.w`, `model.linear.kernel`."""
    return [name for name, _ in _numbers(call, result)]


def _numbers(call: Call, result: Any) -> list[tuple[str, np.ndarray]]:
    trees = {"result": result}
    trees |= {name: x for name, x in call.arguments().items() if _changes_in_place(x)}
    leaves = tree_flatten_with_path(trees)[0]
    return [(_name(path), _as_numpy(x)) for path, x in leaves if _is_number(x)]


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
