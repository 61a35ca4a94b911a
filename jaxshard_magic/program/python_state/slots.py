"""Storage of the values that a step's code reads: names, attributes, closure variables, elements.

A `ValueSlot` holds one value under a key; a `Container` is a complete list, dict, set or NumPy array. Both are read and
written without a call of `__getattr__`, `__setattr__` or `__eq__` of the user's classes.
"""

import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...introspect import is_a

ABSENT = object()  # value of an unbound name or an unset attribute
# Elements of a list or dict that have a slot each. The values of longer ones are compared as a whole.
MAX_ELEMENT_SLOTS = 200
MAX_COMPARED_BYTES = (
    2**16
)  # bytes of a NumPy array whose values are compared; above, it counts as one that nothing changes

SourceLine = tuple[str, int]  # (file name, line number)


@dataclass(frozen=True, eq=False, slots=True)
class ValueSlot:
    """Storage of one value.

    Attributes:
        name: Name in the step's code: `lr`, `self.rate`, `config['rate']`.
        where: Source line that mentions it.
        holder: Dict or list, closure cell, object with `__slots__`, class or function.
        key: Key in the holder: key or index, None for a cell, a descriptor of `__slots__`, or the name of an attribute.
        get: `get(key, ABSENT)` reads the value.
        is_named: Whether the code names the value; else it is one of all attributes of an object.
    """

    name: str
    where: SourceLine
    holder: Any
    key: Any
    get: Callable[[Any, Any], Any]
    is_named: bool = True

    @property
    def value(self) -> Any:
        """Current value; ABSENT for none."""
        return self.get(self.key, ABSENT)

    def assign(self, value: Any) -> None:
        """Assign a value; ABSENT deletes the present one."""
        holder, key = self.holder, self.key
        match holder:
            case dict():
                holder.pop(key, None) if value is ABSENT else holder.__setitem__(key, value)
            case list():
                holder[key] = value
            case types.CellType():
                if value is ABSENT:
                    del holder.cell_contents
                else:
                    holder.cell_contents = value
            case type():
                # Methods of `type`, so that no `__setattr__` of a metaclass runs.
                type.__delattr__(holder, key) if value is ABSENT else type.__setattr__(holder, key, value)
            case types.FunctionType():
                setattr(holder, key, value)
            case _:
                key.__delete__(holder) if value is ABSENT else key.__set__(holder, value)


def make_slot(holder: Any, key: Any, name: str, where: SourceLine, is_named: bool = True) -> ValueSlot:
    """Return the slot of a value.

    Args:
        holder: Dict or list, closure cell, class or function; any other object needs a descriptor of its `__slots__` as
            key.
        key: Key in the holder.
        name: Name in the step's code.
        where: Source line that mentions it.
        is_named: Whether the code names the value.
    """
    match holder:
        case dict():
            get: Callable[[Any, Any], Any] = holder.get
        case list():
            get = partial(_get_element, holder)
        case types.CellType():
            get = partial(_get_cell_value, holder)
        case type():
            get = vars(holder).get
        case types.FunctionType():
            get = partial(getattr, holder)
        case _:
            get = partial(_get_descriptor_value, holder)
    return ValueSlot(name, where, holder, key, get, is_named)


def _get_element(elements: list[Any], index: int, default: Any) -> Any:
    return elements[index] if index < len(elements) else default


def _get_cell_value(cell: types.CellType, _: Any, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty cell: the variable is not bound yet
        return default


def _get_descriptor_value(obj: Any, descriptor: Any, default: Any) -> Any:
    try:
        return descriptor.__get__(obj, type(obj))
    except AttributeError:  # not set
        return default


@dataclass(frozen=True, eq=False, slots=True)
class Container:
    """List, deque, dict, set or small NumPy array that a step's code reaches.

    Attributes:
        name: Name by which the code reaches it.
        where: Source line that mentions it.
        target: The container itself.
        has_element_slots: Whether each element has a slot of its own.
    """

    name: str
    where: SourceLine
    target: Any
    has_element_slots: bool

    def contents_key(self) -> Hashable:
        """Return a key for comparison by `==`: the length, the keys of a dict, the members of a set, the bytes of an
        array."""
        target = self.target
        if is_a(target, dict):
            return (len(target), *target)
        if is_a(target, set):
            return frozenset(target)
        return target.tobytes() if is_a(target, np.ndarray) else len(target)

    def values(self) -> Iterable[Any]:
        """Return the elements to compare by identity; empty for a set and an array."""
        return (
            self.target.values()
            if is_a(self.target, dict)
            else ()
            if is_a(self.target, (set, np.ndarray))
            else self.target
        )

    def restore(self, key: Any, values: Sequence[Any]) -> None:
        """Restore earlier contents.

        Args:
            key: Key of the earlier contents.
            values: Elements of the earlier contents.
        """
        target = self.target
        if is_a(target, np.ndarray):
            target[...] = np.frombuffer(key, target.dtype).reshape(target.shape)
            return
        # In place: other code holds references to the same container.
        target.clear()
        if is_a(target, dict):
            target.update(zip(key[1:], values, strict=True))
        elif is_a(target, set):
            target.update(key)
        else:
            target.extend(values)


def make_container(value: Any, name: str, where: SourceLine) -> Container:
    """Return the `Container` of a value for which `is_container` is true."""
    has_element_slots = is_a(value, (dict, list)) and len(value) <= MAX_ELEMENT_SLOTS
    return Container(name, where, value, has_element_slots)


def is_container(value: Any) -> bool:
    """Return whether a value is a container that can change in place and is watched."""
    if is_a(value, np.ndarray):
        return value.nbytes <= MAX_COMPARED_BYTES and not value.dtype.hasobject
    return is_a(value, (list, dict, set, deque))
