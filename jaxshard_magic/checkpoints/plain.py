"""What is kept beside a state, as what JSON can say and back: small arrays as text, to the bit."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..placing import whole

_ARRAY = "__array__"


def to_plain(value: Any) -> Any:
    """A value of dicts, lists, tuples (which come back as lists), numbers, text, None and arrays as JSON has it. Raises
    TypeError for others.

    >>> from_plain(to_plain({"n": 1, "x": np.ones(2, "float32")}))
    {'n': 1, 'x': array([1., 1.], dtype=float32)}
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(v) for v in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.ascontiguousarray(whole(value)).reshape(np.shape(value))
        return {_ARRAY: [array.dtype.name, list(array.shape), b64encode(array.tobytes()).decode()]}
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


def from_plain(value: Any) -> Any:
    """What `to_plain` was given, with arrays of numpy."""
    if isinstance(value, dict) and set(value) == {_ARRAY}:
        dtype, shape, text = value[_ARRAY]
        return np.frombuffer(bytearray(b64decode(text)), jnp.dtype(dtype)).reshape(shape)
    if isinstance(value, dict):
        return {k: from_plain(v) for k, v in value.items()}
    return [from_plain(v) for v in value] if isinstance(value, list) else value
