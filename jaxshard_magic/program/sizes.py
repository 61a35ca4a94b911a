"""Bytes of arrays as XLA stores them."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp


def array_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of an array as XLA stores it: keys as their data, types narrower than a byte packed.

    >>> array_bytes((5,), jnp.int4)
    3
    """
    return -(-math.prod(shape) * element_bits(dtype) // 8)


def nbytes(aval: Any) -> int:
    """Return the bytes of an array with this abstract value."""
    return array_bytes(aval.shape, aval.dtype)


@cache
def element_bits(dtype: Any) -> int:
    """Return the bits of an element as XLA stores it."""
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return math.prod(data.shape) * element_bits(data.dtype)
    dtype = jnp.dtype(dtype)
    # A dtype narrower than a byte, such as int4, has an itemsize of 1.
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits
    return 8 * dtype.itemsize
