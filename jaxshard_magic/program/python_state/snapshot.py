"""Snapshot of the Python values that a step reads: compared in microseconds, restored after a trace.

`trace_without_side_effects` checks that a trace of a step without `jax.jit` leaves out no side effect that each plain
call has.
"""

import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from types import FunctionType
from typing import Any, TypeVar
from weakref import ref

import jax
import numpy as np
from jax.core import Tracer

from ...code_locations import location_text
from ...errors import ShardError, list_names
from ...introspect import is_a
from ...temporary import Accessor, ChangeGroup, Replaced, UndoUnlessFinished
from ..cache_keys import IdentityKey, cache_key
from . import impure
from .reachable import ReachableState
from .slots import ABSENT, Container, SourceLine, ValueSlot

_called: Any = operator.call  # pyright accepts `operator.call` for functions with one signature only
_Traced = TypeVar("_Traced")
_TRACED_ONCE = "%%shard runs a step's Python once, when it is traced"


@dataclass(frozen=True)
class _StateChange:
    """Change of a reachable value by the step's own code.

    Attributes:
        name: Name in the step's code.
        where: Source line that mentions it.
        kind: `array` for a tracer that was stored, `random` for a generator drawn from, else `value`.
    """

    name: str
    where: SourceLine
    kind: str


class StateInputs:
    """Slots whose values are inputs of a program.

    Args:
        slots: The slots.
    """

    def __init__(self, slots: Sequence[ValueSlot]):
        self.slots = slots

    def bind_values(self, values: Sequence[Any]) -> ChangeGroup:
        """Return a context in which the slots hold tracers; afterwards they hold their own values again.

        Args:
            values: One value for each slot.
        """
        pairs = zip(self.slots, values, strict=True)
        return ChangeGroup(*(Replaced(Accessor(partial(getattr, slot, "value"), slot.assign), v) for slot, v in pairs))


NO_STATE_INPUTS = StateInputs(())


class PythonState:
    """Snapshot of all that a step's code reads besides its arguments.

    Args:
        reach: Slots, containers and generators that the code reaches.
        input_names: Names of slots that are inputs of the program wherever they hold a number or an array.
    """

    def __init__(self, reach: ReachableState, input_names: frozenset[str] = frozenset()):
        self._reach = reach
        self._gets, self._keys = [s.get for s in reach.slots], [s.key for s in reach.slots]
        self._container_keys, self._values = self._read_values()
        is_input = [slot.name in input_names for slot in reach.slots]
        self._input_positions = [i for i, mine in enumerate(is_input) if mine and can_be_input(self._values[i])]
        self.inputs = StateInputs([reach.slots[i] for i in self._input_positions])
        self._container_contents = [list(each.values()) for each in reach.containers]
        self._written_values = [slot.value for slot in reach.written_slots]
        self._generator_states = [impure.generator_state(generator) for generator, _ in reach.generators.values()]

    @property
    def iterators(self) -> Mapping[str, SourceLine]:
        """Iterators that the code takes from, each with a source line."""
        return self._reach.iterators

    @property
    def effects(self) -> Mapping[str, SourceLine]:
        """Side effects that a trace has once, in words, each with a source line."""
        return self._reach.effects

    def retake(self) -> "PythonState":
        """Return a new snapshot of the same slots and containers, without inputs."""
        return PythonState(self._reach)

    def _read_values(self) -> tuple[list[Any], list[Any]]:
        """Return the keys of the containers, and the values of the slots followed by those of containers without
        element slots."""
        # Runs at each call of the step, hence without a Python loop over the slots.
        values = [*map(_called, self._gets, self._keys, repeat(ABSENT))]
        if not self._reach.containers:
            return [], values
        values.extend(chain.from_iterable(c.values() for c in self._reach.containers if not c.has_element_slots))
        return [each.contents_key() for each in self._reach.containers], values

    # At each call -----------------------------------------------------------------------------------------------------

    def current_inputs(self) -> list[Any] | None:
        """Return the current values of the inputs; None where anything else has changed."""
        try:
            container_keys, now = self._read_values()
            if container_keys != self._container_keys or len(now) != len(self._values):
                return None
        except Exception:  # another thread changes a dict, or `__eq__` of a key raises
            return None
        inputs = [now[i] for i in self._input_positions]
        for i in self._input_positions:
            now[i] = self._values[i]
        # By identity: `==` of a user's class or of an array may run anything.
        return inputs if all(map(operator.is_, now, self._values)) and all(map(can_be_input, inputs)) else None

    # In a program's key -----------------------------------------------------------------------------------------------

    @property
    def input_values(self) -> list[Any]:
        """Values of the inputs at the time of the snapshot."""
        return [self._values[i] for i in self._input_positions]

    def program_keys(self) -> tuple[tuple[Hashable, tuple[Hashable, ...]], Hashable]:
        """Return two keys of the program: an exact one, and one that ignores values of numbers and arrays that could be
        inputs."""
        inputs, n = set(self._input_positions), len(self._gets)
        values = tuple("input" if i in inputs else _value_key(x) for i, x in enumerate(self._values))
        values_without_numbers = tuple(
            "input" if i < n and can_be_input(x) else key
            for i, (x, key) in enumerate(zip(self._values, values, strict=True))
        )
        container_keys = tuple(map(cache_key, self._container_keys))
        return (container_keys, values), (container_keys, values_without_numbers)

    def differing_slots(self, key: Any) -> frozenset[str]:
        """Return the names of slots with another value than in the state of this exact key; none where the number of
        slots differs.

        Args:
            key: Exact key of another state, as first returned by `program_keys`.
        """
        now = self.program_keys()[0][1]
        pairs = zip(self._reach.slots, now, key[1], strict=False) if len(now) == len(key[1]) else ()
        return frozenset(slot.name for slot, mine, other in pairs if mine != other)

    # After a trace ----------------------------------------------------------------------------------------------------

    def changes(self) -> list[_StateChange]:
        """Return all changes by the step's code since the snapshot."""
        changes: dict[Any, _StateChange] = {}
        for slot, before in self._saved_slots():
            if (now := slot.value) is before or is_a(slot.holder, FunctionType):
                continue
            if slot.is_named or _change_kind(now) == "array":
                changes.setdefault((id(slot.holder), slot.key), _StateChange(slot.name, slot.where, _change_kind(now)))
        for each, form, values in self._saved_containers():
            if not _is_unchanged(each, form, values):
                changes[id(each.target)] = _StateChange(each.name, each.where, _change_kind(list(each.values())))
        for name, where, generator, before in self._saved_generators():
            if repr(impure.generator_state(generator)) != repr(before):
                changes[id(generator)] = _StateChange(name, where, "random")
        return list(changes.values())

    def restore(self) -> None:
        """Restore all values of the snapshot."""
        for each, form, values in self._saved_containers():
            if not _is_unchanged(each, form, values):
                each.restore(form, values)
        for slot, before in self._saved_slots():
            if slot.value is not before:
                slot.assign(before)
        for _, _, generator, before in self._saved_generators():
            if repr(impure.generator_state(generator)) != repr(before):
                impure.set_generator_state(generator, before)

    def _saved_slots(self) -> Iterator[tuple[ValueSlot, Any]]:
        yield from zip(self._reach.slots, self._values, strict=False)
        yield from zip(self._reach.written_slots, self._written_values, strict=True)

    def _saved_containers(self) -> Iterator[tuple[Container, Any, list[Any]]]:
        return zip(self._reach.containers, self._container_keys, self._container_contents, strict=True)

    def _saved_generators(self) -> Iterator[tuple[str, SourceLine, Any, Any]]:
        for (name, (generator, where)), before in zip(
            self._reach.generators.items(), self._generator_states, strict=True
        ):
            yield name, where, generator, before


def _is_unchanged(container: Container, key: Any, values: Sequence[Any]) -> bool:
    """Return whether a container is unchanged."""
    now = list(container.values())
    return container.contents_key() == key and len(now) == len(values) and all(map(operator.is_, now, values))


def can_be_input(value: Any) -> bool:
    """Return whether a Python value can be an input of a program: a number, or an array that a device can hold.

    Ints must fit into int32.
    """
    if type(value) is int:
        return -(2**31) <= value < 2**31
    if type(value) in (float, complex):
        return True
    return is_a(value, jax.Array) or (is_a(value, (np.ndarray, np.generic)) and value.dtype.kind not in "OSUMmV")


def _value_key(value: Any) -> Hashable:
    """Return a key for the value of a slot. Contents of containers and objects have slots of their own."""
    if is_a(value, (jax.Array, np.ndarray)):
        return _ArrayIdentity(value)
    if is_a(value, tuple):
        return type(value), tuple(map(_value_key, value))
    if is_a(value, (list, dict, set, deque)):
        return type(value)
    return cache_key(value) if hasattr(type(value), "__hash__") and type(value).__hash__ else IdentityKey(value)


class _ArrayIdentity:
    """Key equal for one array alone, without a strong reference to the array."""

    __slots__ = ("_id", "_ref")

    def __init__(self, array: Any):
        self._id, self._ref = id(array), ref(array)

    def __hash__(self) -> int:
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ArrayIdentity) and self._ref() is not None and self._ref() is other._ref()


def _change_kind(value: Any, depth: int = 4) -> str:
    """Return `array` for a tracer or a container with one (up to `depth` levels down); else `value`."""
    if is_a(value, Tracer):
        return "array"
    elements = value.values() if is_a(value, dict) else value if is_a(value, (list, tuple, set)) else ()
    return "array" if depth and any(_change_kind(x, depth - 1) == "array" for x in elements) else "value"


def trace_without_side_effects(trace: Callable[[], _Traced], state: PythonState | None, step: str) -> _Traced:
    """Return the result of `trace()` for a step without side effects that recur at each call.

    A change that a second trace does not make again, such as a table filled once, stays.

    Args:
        trace: Function that traces the step; called twice where the first trace changed values.
        state: Snapshot taken before; None for a step whose Python runs once in plain JAX as well.
        step: Name of the step, for messages.

    Raises:
        ShardError: The step takes from an iterator, draws from a random generator, keeps arrays of the trace, or
            changes a value of the notebook at each call. All values are restored first.
    """
    if state is None:
        return trace()
    for name, where in state.iterators.items():
        raise ShardError(
            f"{step} takes from the iterator {name} ({location_text(*where)}), and {_TRACED_ONCE}: every "
            "call would be given the "
            f"same. Take it outside, batch = next({name}), and pass that"
        )
    with UndoUnlessFinished(state.restore) as work:
        traced = trace()
        changes = state.changes()
        if changes and all(change.kind == "value" for change in changes):
            # A first trace may fill caches and tables; only a change that the second trace repeats would recur at each
            # call.
            second_snapshot = state.retake()
            traced = trace()
            changes = second_snapshot.changes()
        if changes:
            raise _side_effect_error(step, changes)
        work.mark_finished()
        return traced


def _side_effect_error(step: str, changes: list[_StateChange]) -> ShardError:
    first = min(changes, key=lambda change: ("random", "array", "value").index(change.kind))
    same_kind = [change.name for change in changes if change.kind == first.kind]
    names, where = list_names(same_kind[:3]), location_text(*first.where)
    if first.kind == "random":
        return ShardError(
            f"{step} draws random numbers from {names} ({where}), and {_TRACED_ONCE}: every call would "
            "have the same ones. "
            "Draw them outside and pass them, or pass a key and use jax.random"
        )
    if first.kind == "array":
        return ShardError(
            f"{step} keeps an array in {names} ({where}), which a compiled step can't: return it from the step, and "
            "keep it outside"
        )
    return ShardError(
        f"{step} changes {names} each time that it is called ({where}), and {_TRACED_ONCE}: change it "
        "outside, or return "
        "what it is to be"
    )
