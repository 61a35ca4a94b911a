"""Cache keys for Python values: equal keys run the same compiled program."""

import types
from collections.abc import Hashable, Mapping
from dataclasses import is_dataclass
from typing import Any

from ..introspect import is_a, own_attributes


class IdentityKey:
    """Key equal for a single object only, by identity; keeps the object alive.

    Args:
        of: The object.
    """

    __slots__ = ("of",)

    def __init__(self, of: Any):
        self.of = of

    def __hash__(self) -> int:
        # An id is unique only while its object lives; the key keeps the object alive.
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.of is other.of


class EqualityKey(IdentityKey):
    """Key equal where the objects are equal by their own `__hash__` and `__eq__`.

    An `__eq__` that raises, or that returns arrays, makes keys unequal.

    Args:
        of: The object.

    Raises:
        TypeError: The object has no hash.
    """

    __slots__ = ("_hash",)

    def __init__(self, of: Any):
        super().__init__(of)
        # With the type, since 1 and True are equal and have one hash, but need not trace to the same program.
        self._hash = hash((type(of), of))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EqualityKey) or self._hash != other._hash or type(self.of) is not type(other.of):
            return False
        if self.of is other.of:
            return True
        try:
            return bool(self.of == other.of)
        except Exception:  # the user's `__eq__` may raise anything
            return False


def cache_key(value: Any) -> Hashable:
    """Return a cache key for a Python value.

    Args:
        value: A number, a text, a container, a dataclass, or any object with a hash.

    Raises:
        TypeError: The value may change and can't be compared.
    """
    if is_a(value, float):
        return float, value.hex()  # NaN equals itself, -0.0 differs from 0.0
    if is_a(value, tuple):
        return type(value), tuple(map(cache_key, value))
    try:
        return EqualityKey(value)
    except TypeError:  # unhashable
        pass
    except Exception:  # the user's `__hash__` may raise anything
        return IdentityKey(value)
    if is_a(value, list):
        return list, tuple(map(cache_key, value))
    if is_a(value, (set, frozenset)):
        return type(value), frozenset(map(cache_key, value))
    if is_a(value, Mapping):
        return type(value), tuple((cache_key(k), cache_key(v)) for k, v in value.items())
    if is_dataclass(type(value)) or is_a(value, types.SimpleNamespace):
        return type(value), tuple((k, cache_key(v)) for k, v in own_attributes(value).items())
    raise TypeError(f"{type(value).__name__} can change, and can't be compared")
