"""Batches as pytrees: containers keep their types, and dicts their key order."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ..device_arrays import is_local


def map_leaves(f: Callable[[Any], Any], batch: Any) -> Any:
    """Return the batch with `f` applied to each leaf.

    Unlike `jax.tree.map`, keep the key order of dicts.

    >>> map_leaves(lambda x: x + 1, {"y": 1, "x": [2, (3,)]})
    {'y': 2, 'x': [3, (4,)]}
    """
    # `jax.tree.map` sorts the keys of dicts.
    if type(batch) is dict:
        return {key: map_leaves(f, value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(map_leaves(f, value) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(f, value) for value in batch))
    return jax.tree.map(f, batch)


def leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch, in the order of `map_leaves`."""
    flat: list[Any] = []
    map_leaves(flat.append, batch)
    return flat


def is_array(x: Any) -> bool:
    """Return whether a step accepts `x` as an array."""
    # Not objects, bytes, text, dates and time differences.
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def as_numpy(x: Any) -> Any:
    """Return tensors of other libraries as NumPy arrays in the same memory, or as JAX arrays by DLPack where NumPy
    cannot.

    Anything else is returned unchanged.
    """
    if isinstance(x, (np.ndarray, np.generic, jax.Array)) or not (hasattr(x, "__array__") and hasattr(x, "__dlpack__")):
        return x
    with suppress(TypeError, RuntimeError, BufferError):  # a tensor on an accelerator, or of a dtype that NumPy lacks
        return np.asarray(x)
    return jax.numpy.from_dlpack(x)


def copy_numpy(x: Any) -> Any:
    """Return a copy of a NumPy array, because loaders may write the next batch into the same memory."""
    return x.copy() if isinstance(x, np.ndarray) else x


def leaf_signature(x: Any) -> Any:
    """Return a key equal for leaves that go to the same devices: shape, dtype and whether the array is a host's
    part."""
    return (x.shape, x.dtype, is_local(x)) if isinstance(x, (jax.Array, np.ndarray)) else type(x)


def row_count(batch: Any) -> int | None:
    """Return the size of dimension 0 of the first array with one; None without any."""
    return next((x.shape[0] for x in leaves(batch) if is_array(x) and x.ndim), None)
