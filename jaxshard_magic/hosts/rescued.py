"""Values that a host holds whole, for a kernel that has none of its classes: in plain containers, arrays as numpy's."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..placing import is_key
from ..program.arrays import plain_tree
from ..step.together import finished

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Rescued:
    """The values of names, each with numpy arrays in the place of jax's; of typed keys their numbers. Dicts, lists,
    tuples and named tuples of installed packages stay what they are; of anything else with parts (NNX objects,
    dataclasses, modules of Equinox, objects of the notebook's classes) it is a dict of them.

    Attributes:
        without: The paths of what is no array, number or text, and was left out.
        keys: Whether there were typed keys.

    Raises ValueError for an array that this host has no whole of.
    """

    def __init__(self) -> None:
        self.without: list[str] = []
        self.keys = False
        self._opened: set[int] = set()

    def value(self, x: Any, path: str) -> Any:
        """The value that goes by a path."""
        if isinstance(x, jax.Array):
            return self._read(x, path)
        if isinstance(x, _PLAIN) or (isinstance(x, np.ndarray) and not x.dtype.hasobject):
            return x
        if id(x) in self._opened:
            self.without.append(path)
            return None
        self._opened.add(id(x))
        try:
            return self._opened_up(plain_tree(x), path)
        finally:
            self._opened.discard(id(x))

    def _opened_up(self, x: Any, path: str) -> Any:
        if isinstance(x, (jax.Array, *_PLAIN)):
            return self.value(x, path)
        parts = [(name, part, f"{path}.{name}") for name, part in _parts(x)]
        if not parts and not isinstance(x, dict | list | tuple):
            self.without.append(path)
            return None
        values = {name: self.value(part, inner) for name, part, inner in parts}
        if isinstance(x, tuple) and hasattr(x, "_fields") and type(x).__module__ != "__main__":
            return type(x)(*values.values())
        if isinstance(x, list) or (isinstance(x, tuple) and not hasattr(x, "_fields")):
            return type(x)(values.values()) if type(x) in (list, tuple) else [*values.values()]
        return values

    def _read(self, x: jax.Array, path: str) -> np.ndarray:
        if not (x.is_fully_addressable or x.is_fully_replicated):
            raise ValueError(f"{path} lies on several hosts, none of which has all of it")
        if (whole := finished(x)) is None:
            raise ValueError(f"the step that the host died in has taken over {path}")
        if is_key(whole):
            self.keys = True
            whole = jax.random.key_data(whole)
        return np.asarray(whole)


def _parts(x: Any) -> Iterator[tuple[Any, Any]]:
    """What a value is made of, by names or places: a container's items, a pytree node's children, the attributes of an
    object of the notebook."""
    if isinstance(x, dict):
        yield from ((key if isinstance(key, (str, int)) else str(key), value) for key, value in x.items())
        return
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        yield from zip(x._fields, x, strict=True)  # pyright: ignore[reportAttributeAccessIssue]
        return
    found, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda part: part is not x)
    if not (len(found) == 1 and found[0][1] is x):
        yield from ((_name(path), part) for path, part in found)
    elif type(x).__module__ == "__main__" and hasattr(x, "__dict__"):
        yield from vars(x).items()


def _name(path: Any) -> Any:
    [key] = path
    return next((getattr(key, name) for name in ("name", "key", "idx") if hasattr(key, name)), str(key))
