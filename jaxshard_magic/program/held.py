"""Python values that a program is made for, as keys: equal keys run the same program."""

import types
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from typing import Any

from ..introspect import is_a, own_attributes


class Same:
    """A key that is equal for one object alone, which it keeps alive."""

    __slots__ = ("of",)

    def __init__(self, of: Any):
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of


class ByValue(Same):
    """A key that is equal where the objects are, by their own `__hash__` and `__eq__`. What these raise, or an
    `__eq__` that gives arrays, makes them unequal."""

    __slots__ = ("_hash",)

    def __init__(self, of: Any):
        super().__init__(of)
        self._hash = hash((type(of), of))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByValue) or self._hash != other._hash or type(self.of) is not type(other.of):
            return False
        if self.of is other.of:
            return True
        try:
            return bool(self.of == other.of)
        except Exception:  # whatever a class of the user's does there
            return False


def held_key(value: Any) -> Hashable:
    """Return a key for a Python value.

    Raises TypeError for one that may change and can't be compared.
    """
    if is_a(value, float):
        return float, value.hex()  # so that nan is itself and -0.0 is not 0.0
    if is_a(value, tuple):
        return type(value), tuple(map(held_key, value))
    try:
        return ByValue(value)
    except TypeError:  # no hash
        pass
    except Exception:  # whatever a class of the user's does in its __hash__
        return Same(value)
    if is_a(value, list):
        return list, tuple(map(held_key, value))
    if is_a(value, (set, frozenset)):
        return type(value), frozenset(map(held_key, value))
    if is_a(value, Mapping):
        return type(value), tuple((held_key(k), held_key(v)) for k, v in value.items())
    if is_dataclass(type(value)) or is_a(value, types.SimpleNamespace):
        return type(value), tuple((k, held_key(v)) for k, v in own_attributes(value).items())
    raise TypeError(f"{type(value).__name__} can change, and can't be compared")
