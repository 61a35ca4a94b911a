"""A snapshot of the Python values that a step reads: compared in microseconds, and restored after a trace."""

import operator
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from operator import is_
from types import FunctionType
from typing import Any
from weakref import ref

import jax
import numpy as np
from jax.core import Tracer

from ...introspect import is_a
from ...temporary import Joined, Place, Replaced
from ..held import Same, held_key
from . import impure
from .reach import Reach
from .slots import ABSENT, Container, Slot, Where

_called: Any = operator.call  # pyright knows it for functions of one form alone


@dataclass(frozen=True)
class Change:
    """What a step's own code did to a value that it reaches.

    Attributes:
        name: What the code calls it. `where`: a line that mentions it.
        kind: `array` where it keeps an array of the trace, `random` of a generator that it drew from, else `value`.
    """

    name: str
    where: Where
    kind: str


class Inputs:
    """The slots whose values are inputs of a program."""

    def __init__(self, slots: Sequence[Slot]):
        self.slots = slots

    def holding(self, values: Sequence[Any]) -> Joined:
        """A context in which the slots hold values of a trace, and after which they hold their own again."""
        pairs = zip(self.slots, values, strict=True)
        return Joined(*(Replaced(Place(partial(getattr, slot, "value"), slot.put), v) for slot, v in pairs))


NO_INPUTS = Inputs(())


class PythonState:
    """What a step's code reads beside its arguments, as it was when the step was called.

    Args:
        reach: the places that the code reaches.
        taken: names of the slots that are inputs of the program, where they hold a number or an array.
    """

    def __init__(self, reach: Reach, taken: frozenset[str] = frozenset()):
        self._reach = reach
        self._gets, self._keys = [s.get for s in reach.slots], [s.key for s in reach.slots]
        self._whole = [each.of for each in reach.containers if not each.elements]
        self._forms, self._values = self._read()
        named = [slot.name in taken for slot in reach.slots]
        self._at = [i for i, mine in enumerate(named) if mine and can_be_input(self._values[i])]
        self.inputs = Inputs([reach.slots[i] for i in self._at])
        self._contents = [list(each.values()) for each in reach.containers]
        self._written = [slot.value for slot in reach.written]
        self._generators = [impure.state_of(generator) for generator, _ in reach.generators.values()]

    @property
    def iterators(self) -> Mapping[str, Where]:
        """Iterators that the code takes from, each with a line."""
        return self._reach.iterators

    @property
    def effects(self) -> Mapping[str, Where]:
        """What a trace does once, in words, each with a line."""
        return self._reach.effects

    def now(self) -> "PythonState":
        """Another snapshot of the same places."""
        return PythonState(self._reach)

    def _read(self) -> tuple[list[Any], list[Any]]:
        """The forms of the containers; the values of the slots, then those of containers that have no slots."""
        values = [*map(_called, self._gets, self._keys, repeat(ABSENT))]
        if not self._reach.containers:
            return [], values
        values.extend(chain.from_iterable(c.values() for c in self._reach.containers if not c.elements))
        return [each.form() for each in self._reach.containers], values

    # At each call -----------------------------------------------------------------------------------------------------

    def inputs_now(self) -> list[Any] | None:
        """Return the values of the inputs as they are now; None where anything else is not what it was."""
        try:
            forms, now = self._read()
            if forms != self._forms or len(now) != len(self._values):
                return None
        except Exception:  # a thread changes a dict meanwhile; or what the keys of one do in their __eq__
            return None
        inputs = [now[i] for i in self._at]
        for i in self._at:
            now[i] = self._values[i]
        return inputs if all(map(is_, now, self._values)) and all(map(can_be_input, inputs)) else None

    # In a program's key -----------------------------------------------------------------------------------------------

    @property
    def input_values(self) -> list[Any]:
        """What the inputs held."""
        return [self._values[i] for i in self._at]

    def keys(self) -> tuple[tuple[Hashable, tuple[Hashable, ...]], Hashable]:
        """Return what tells states apart that make different programs; and the same, but for the values of numbers and
        arrays that could be inputs."""
        inputs, n = set(self._at), len(self._gets)
        values = tuple("input" if i in inputs else _key(x) for i, x in enumerate(self._values))
        loose = tuple(
            "input" if i < n and can_be_input(x) else key
            for i, (x, key) in enumerate(zip(self._values, values, strict=True))
        )
        forms = tuple(map(held_key, self._forms))
        return (forms, values), (forms, loose)

    def differing(self, key: Any) -> frozenset[str]:
        """Return the names of the slots that held something else in a state of this exact key; none where that has
        other slots."""
        now = self.keys()[0][1]
        pairs = zip(self._reach.slots, now, key[1], strict=False) if len(now) == len(key[1]) else ()
        return frozenset(slot.name for slot, mine, other in pairs if mine != other)

    # After a trace ----------------------------------------------------------------------------------------------------

    def changes(self) -> list[Change]:
        """Return what the step's code has changed since."""
        found: dict[Any, Change] = {}
        for slot, before in self._slots():
            if (now := slot.value) is before or is_a(slot.holder, FunctionType):
                continue
            if slot.said or _kind_of(now) == "array":
                found.setdefault((id(slot.holder), slot.key), Change(slot.name, slot.where, _kind_of(now)))
        for each, form, values in self._held():
            if not _holds(each, form, values):
                found[id(each.of)] = Change(each.name, each.where, _kind_of(list(each.values())))
        for name, where, generator, before in self._drawn():
            if repr(impure.state_of(generator)) != repr(before):
                found[id(generator)] = Change(name, where, "random")
        return list(found.values())

    def undo(self) -> None:
        """Have everything hold again what it held."""
        for each, form, values in self._held():
            if not _holds(each, form, values):
                each.restore(form, values)
        for slot, before in self._slots():
            if slot.value is not before:
                slot.put(before)
        for _, _, generator, before in self._drawn():
            if repr(impure.state_of(generator)) != repr(before):
                impure.set_state(generator, before)

    def _slots(self) -> Iterator[tuple[Slot, Any]]:
        yield from zip(self._reach.slots, self._values, strict=False)
        yield from zip(self._reach.written, self._written, strict=True)

    def _held(self) -> Iterator[tuple[Container, Any, list[Any]]]:
        return zip(self._reach.containers, self._forms, self._contents, strict=True)

    def _drawn(self) -> Iterator[tuple[str, Where, Any, Any]]:
        for (name, (generator, where)), before in zip(
            self._reach.generators.items(), self._generators, strict=True
        ):
            yield name, where, generator, before


def _holds(container: Container, form: Any, values: Sequence[Any]) -> bool:
    """Return whether a container is as it was."""
    now = list(container.values())
    return container.form() == form and len(now) == len(values) and all(map(is_, now, values))


def can_be_input(value: Any) -> bool:
    """Return whether a program can take a Python value as an input: a number, an array that a device can hold."""
    if type(value) is int:
        return -(2**31) <= value < 2**31  # more than an array of int32 holds
    if type(value) in (float, complex):
        return True
    return is_a(value, jax.Array) or (
        is_a(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OSUMmV"
    )


def _key(value: Any) -> Hashable:
    """Return a key for a value that a slot holds. What containers and objects hold are slots of their own."""
    if is_a(value, (jax.Array, np.ndarray)):
        return _Living(value)
    if is_a(value, tuple):
        return type(value), tuple(map(_key, value))
    if is_a(value, (list, dict, set, deque)):
        return type(value)
    return held_key(value) if hasattr(type(value), "__hash__") and type(value).__hash__ else Same(value)


class _Living:
    """A key that is equal for one array alone, and keeps it not alive."""

    __slots__ = ("_id", "_ref")

    def __init__(self, array: Any):
        self._id, self._ref = id(array), ref(array)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Living) and self._ref() is not None and self._ref() is other._ref()


def _kind_of(value: Any, depth: int = 4) -> str:
    """Return `array` for what is, or holds, an array of a trace; else `value`."""
    if is_a(value, Tracer):
        return "array"
    inside = value.values() if is_a(value, dict) else value if is_a(value, (list, tuple, set)) else ()
    return "array" if depth and any(_kind_of(x, depth - 1) == "array" for x in inside) else "value"
