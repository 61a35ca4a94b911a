"""Values saved beside a state as JSON: small arrays become text, exact to the bit."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..device_arrays import to_numpy

_ARRAY = "__array__"


def to_json_value(value: Any) -> Any:
    """Return a value in the types of JSON.

    Args:
        value: Dicts (keys become text), lists, tuples (which come back as lists), numbers, text, None and arrays.

    Raises:
        TypeError: The value has another type in it.

    >>> from_json_value(to_json_value({"n": 1, "x": np.ones(2, "float32")}))
    {'n': 1, 'x': array([1., 1.], dtype=float32)}
    """
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(v) for v in value]
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.ascontiguousarray(to_numpy(value)).reshape(np.shape(value))
        return {_ARRAY: [array.dtype.name, list(array.shape), b64encode(array.tobytes()).decode()]}
    raise TypeError(f"{type(value).__name__} is nothing that JSON can say")


def from_json_value(value: Any) -> Any:
    """Return the value that was given to `to_json_value`, with numpy arrays."""
    if isinstance(value, dict) and set(value) == {_ARRAY}:
        dtype, shape, text = value[_ARRAY]
        # Over bytes instead of a bytearray, numpy's array would be read-only.
        return np.frombuffer(bytearray(b64decode(text)), jnp.dtype(dtype)).reshape(shape)
    if isinstance(value, dict):
        return {k: from_json_value(v) for k, v in value.items()}
    return [from_json_value(v) for v in value] if isinstance(value, list) else value
