"""Where Python keeps the values that a step's code reads: names, attributes, variables of closures, elements.

A `Slot` holds one value under a key; a `Container` is a list, dict, set or NumPy array as a whole. Both are read and
written past `__getattr__`, `__setattr__` and `__eq__` of the user's classes.
"""

import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...introspect import is_a

ABSENT = object()  # the value of a name that is not bound, of an attribute that is not set
FEW = 200  # elements of a list or dict that are slots of their own; of longer ones the values are compared as a whole
SMALL = (
    2**16
)  # bytes of a NumPy array whose values are compared; above, it counts as one that nothing changes

Where = tuple[str, int]  # a file as Python knows it, and a line of it


@dataclass(frozen=True, eq=False, slots=True)
class Slot:
    """A value's place.

    Attributes:
        name: What the step's code calls it: `lr`, `self.rate`, `config['rate']`.
        where: A line that mentions it.
        holder, key: What it lies in, and under which key: a dict or list, a cell and None, an object and a descriptor
            of `__slots__`, a class or a function and the name of an attribute.
        get: `get(key, ABSENT)` reads it.
        said: Whether the code names it; else it is one of all that an object holds.
    """

    name: str
    where: Where
    holder: Any
    key: Any
    get: Callable[[Any, Any], Any]
    said: bool = True

    @property
    def value(self) -> Any:
        """What it holds now; ABSENT for nothing."""
        return self.get(self.key, ABSENT)

    def put(self, value: Any) -> None:
        """Have it hold a value; ABSENT for nothing."""
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
                type.__delattr__(holder, key) if value is ABSENT else type.__setattr__(holder, key, value)
            case types.FunctionType():
                setattr(holder, key, value)
            case _:
                key.__delete__(holder) if value is ABSENT else key.__set__(holder, value)


def slot_of(holder: Any, key: Any, name: str, where: Where, said: bool = True) -> Slot:
    """Return the slot of a dict's or list's element, a cell, a class's or a function's attribute, or a descriptor of an
    object's `__slots__`."""
    match holder:
        case dict():
            get: Callable[[Any, Any], Any] = holder.get
        case list():
            get = partial(_in_list, holder)
        case types.CellType():
            get = partial(_in_cell, holder)
        case type():
            get = vars(holder).get
        case types.FunctionType():
            get = partial(getattr, holder)
        case _:
            get = partial(_in_slot, holder)
    return Slot(name, where, holder, key, get, said)


def _in_list(of: list[Any], at: int, default: Any) -> Any:
    return of[at] if at < len(of) else default


def _in_cell(cell: types.CellType, _: Any, default: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is bound to the variable yet
        return default


def _in_slot(obj: Any, descriptor: Any, default: Any) -> Any:
    try:
        return descriptor.__get__(obj, type(obj))
    except AttributeError:  # not set
        return default


@dataclass(frozen=True, eq=False, slots=True)
class Container:
    """A list, deque, dict, set or small NumPy array that a step's code reaches, by the name that leads to it.

    `elements`: whether its values are slots of their own.
    """

    name: str
    where: Where
    of: Any
    elements: bool

    def form(self) -> Hashable:
        """Return what is compared by `==`: its length, the keys of a dict, the members of a set, an array's bytes."""
        of = self.of
        if is_a(of, dict):
            return (len(of), *of)
        if is_a(of, set):
            return frozenset(of)
        return of.tobytes() if is_a(of, np.ndarray) else len(of)

    def values(self) -> Iterable[Any]:
        """Return what is compared by identity."""
        return (
            self.of.values() if is_a(self.of, dict) else () if is_a(self.of, (set, np.ndarray)) else self.of
        )

    def restore(self, form: Any, values: Sequence[Any]) -> None:
        """Give it back what it held."""
        of = self.of
        if is_a(of, np.ndarray):
            of[...] = np.frombuffer(form, of.dtype).reshape(of.shape)
            return
        of.clear()
        if is_a(of, dict):
            of.update(zip(form[1:], values, strict=True))
        elif is_a(of, set):
            of.update(form)
        else:
            of.extend(values)


def container_of(value: Any, name: str, where: Where) -> Container:
    """Return a value for which `is_container` is true as one."""
    own = is_a(value, (dict, list)) and len(value) <= FEW
    return Container(name, where, value, own)


def is_container(value: Any) -> bool:
    """Return whether what a value holds can change in place, and is looked at."""
    if is_a(value, np.ndarray):
        return value.nbytes <= SMALL and not value.dtype.hasobject
    return is_a(value, (list, dict, set, deque))
