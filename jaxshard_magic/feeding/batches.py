"""A batch as its arrays and back: containers keep their kinds, and dicts the order of their keys."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from ..placing import is_part


def mapped(f: Callable[[Any], Any], batch: Any) -> Any:
    """The batch with `f` of each leaf in its place.

    >>> mapped(lambda x: x + 1, {"y": 1, "x": [2, (3,)]})
    {'y': 2, 'x': [3, (4,)]}
    """
    if type(batch) is dict:
        return {key: mapped(f, value) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(mapped(f, value) for value in batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(f, value) for value in batch))
    return jax.tree.map(f, batch)


def leaves(batch: Any) -> list[Any]:
    """The leaves of a batch, in the order in which `mapped` comes to them."""
    found: list[Any] = []
    mapped(found.append, batch)
    return found


def is_array(x: Any) -> bool:
    """Is it an array that a step can be given?"""
    return isinstance(x, jax.Array) or (isinstance(x, np.ndarray) and x.dtype.kind not in "OSUMm")


def as_numpy(x: Any) -> Any:
    """Tensors of other libraries as NumPy arrays, in the same memory; anything else as it is."""
    if isinstance(x, (np.ndarray, np.generic, jax.Array)) or not (
        hasattr(x, "__array__") and hasattr(x, "__dlpack__")
    ):
        return x
    with suppress(TypeError, RuntimeError, BufferError):  # on an accelerator, or of a type that NumPy lacks
        return np.asarray(x)
    return jax.numpy.from_dlpack(x)


def own(x: Any) -> Any:
    """A copy of what a loader may write its next batch over."""
    return x.copy() if isinstance(x, np.ndarray) else x


def kind(x: Any) -> Any:
    """What tells whether two leaves go to the same places."""
    return (x.shape, x.dtype, is_part(x)) if isinstance(x, (jax.Array, np.ndarray)) else type(x)


def rows(batch: Any) -> int | None:
    """The size of dimension 0 of the first array that has one; None without any."""
    return next((x.shape[0] for x in leaves(batch) if is_array(x) and x.ndim), None)
