"""Convert values of a host into plain containers of NumPy arrays, for a kernel without the classes."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..device_arrays import is_prng_key
from ..program.arrays import to_plain_tree
from ..step.multihost_calls import finished_state

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class PlainValues:
    """Converter of values into plain containers, with NumPy arrays for JAX's and key data for typed keys.

    Dicts, lists, tuples and named tuples of installed packages keep their type. Any other object with parts (NNX
    objects, dataclasses, Equinox modules, objects of the notebook's classes) becomes a dict.

    Attributes:
        omitted_paths: Paths of parts left out: neither array, number nor text.
        has_keys: Whether there were typed keys.
    """

    def __init__(self) -> None:
        self.omitted_paths: list[str] = []
        self.has_keys = False
        self._opened: set[int] = set()

    def convert(self, x: Any, path: str) -> Any:
        """Convert a value.

        Args:
            x: Value.
            path: Path of the value, for messages and `omitted_paths`.

        Raises:
            ValueError: This host has only a part of an array, or the array was donated to a step that never ends.
        """
        if isinstance(x, jax.Array):
            return self._convert_array(x, path)
        if isinstance(x, _PLAIN) or (isinstance(x, np.ndarray) and not x.dtype.hasobject):
            return x
        # A container may contain itself.
        if id(x) in self._opened:
            self.omitted_paths.append(path)
            return None
        self._opened.add(id(x))
        try:
            return self._opened_up(to_plain_tree(x), path)
        finally:
            self._opened.discard(id(x))

    def _opened_up(self, x: Any, path: str) -> Any:
        if isinstance(x, (jax.Array, *_PLAIN)):
            return self.convert(x, path)
        parts = [(name, part, f"{path}.{name}") for name, part in _children(x)]
        if not parts and not isinstance(x, dict | list | tuple):
            self.omitted_paths.append(path)
            return None
        values = {name: self.convert(part, inner) for name, part, inner in parts}
        if isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__module__ != "__main__":
            return type(x)(*values.values())
        if isinstance(x, list) or (isinstance(x, tuple) and not hasattr(x, "_fields")):
            return type(x)(values.values()) if type(x) in (list, tuple) else [*values.values()]
        return values

    def _convert_array(self, x: jax.Array, path: str) -> np.ndarray:
        """Return an array as NumPy's; raise ValueError unless all of it is on this host and computed."""
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(f"{path} lies on several hosts, none of which has all of it")
        if (whole := finished_state(x)) is None:
            # After the death of a host a name may hold the result of a step that never ends: reading it would wait
            # forever.
            raise ValueError(f"the step that the host died in has taken over {path}")
        if is_prng_key(whole):
            self.has_keys = True
            whole = jax.random.key_data(whole)
        return np.asarray(whole)


def _children(x: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a value by name or index: items of a container, children of a pytree node, attributes of a
    notebook object."""
    if isinstance(x, dict):
        yield from ((key if isinstance(key, (str, int)) else str(key), value) for key, value in x.items())
        return
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from zip(x._fields, x, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        return
    # One level alone: everything below `x` counts as a leaf.
    found, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda part: part is not x)
    if not (len(found) == 1 and found[0][1] is x):
        yield from ((_name(path), part) for path, part in found)
    elif type(x).__module__ == "__main__" and hasattr(x, "__dict__"):
        yield from vars(x).items()


def _name(path: Any) -> Any:
    [key] = path
    return next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), str(key))
