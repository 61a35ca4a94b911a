"""Slots, containers and generators that a step's code reaches.

A walk begins at the step's function, over the names in its code and in the code of the user's functions among their
values. An attribute is read where its object is known (`self.rate`, `config.rate`). An attribute of a call's result or
of an element is read on every object met by the walk.
"""

import builtins
import functools
import sys
import types
from argparse import Namespace
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import jax
import numpy as np

from ...code_reads import Chain, reads_of
from ...introspect import is_a, is_iterator, own_attributes, own_dict, slots
from ..source_lines import is_user_class, is_user_file
from ..unwrap import is_jitted
from . import impure
from .slots import ABSENT, Container, SourceLine, ValueSlot, is_container, make_container, make_slot

MAX_FUNCTIONS = 500
MAX_VALUES = 20_000

_ATOMIC_TYPES = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    types.ModuleType,
    jax.Array,
    np.generic,
)
_RECORD_TYPES = (
    types.SimpleNamespace,
    Namespace,
    UserDict,
)  # all attributes are read, as by `vars(config)`; dataclasses as well
_CONSTRUCTORS = ("__init__", "__post_init__", "setup")  # run by Python or Flax when a class is called


class WatchKind(Enum):
    """Treatment of a value by the walk.

    Attributes:
        WATCHED: Value of the notebook or of the step's object: everything read of it may change between calls.
        ARGUMENT: NNX object among the step's arguments. Its arrays are inputs and its attributes are compared as part
            of the arguments, but other objects inside may change.
        PASSED: Pytree among the step's arguments, all inputs; but it may contain functions.
    """

    WATCHED = 0
    ARGUMENT = 1
    PASSED = 2


KnownParameters = Mapping[str, tuple[Any, WatchKind]]  # name to (value, treatment)


class ReachableState:
    """Everything that a step's code reaches.

    Args:
        function: Function of the step.
        arguments: Arguments by parameter name, each with its treatment.
        objects: Python objects among the arguments for which the program is specialised.
        is_node: Predicate for NNX objects, whose arrays are read by flax.

    Attributes:
        slots: Values that the code reads.
        written_slots: Slots that the code assigns to, whether read or not.
        containers: Lists, dicts, sets and arrays of which the code may read elements.
        generators: Random generators by name, each with a source line that mentions it.
        iterators: Names of iterators, each with a source line.
        effects: Side effects that a trace has once, in words, each with a source line.
    """

    def __init__(
        self, function: Any, arguments: KnownParameters, objects: Iterable[Any], is_node: Callable[[Any], bool]
    ):
        self._is_node = is_node
        self._own_file = function.__code__.co_filename if is_a(function, types.FunctionType) else ""
        self.slots: list[ValueSlot] = []
        self.written_slots: list[ValueSlot] = []
        self.containers: list[Container] = []
        self.generators: dict[str, tuple[Any, SourceLine]] = {}
        self.iterators: dict[str, SourceLine] = {}
        self.effects: dict[str, SourceLine] = {}
        self._slot_by_key: dict[tuple[int, Any], ValueSlot] = {}
        self._visited: dict[tuple[int, WatchKind], Any] = {}  # stored so that no id is reused
        self._entered_code: set[tuple[types.CodeType, int]] = set()
        self._owners: list[Any] = []
        self._objects: list[tuple[Any, str, WatchKind]] = []
        self._unnamed_attributes: dict[str, SourceLine] = {}  # attributes of call results and of elements
        self._unnamed_assignments: dict[str, SourceLine] = {}
        self._is_named = True  # whether the code names the value visited now
        self._pending: list[Callable[[], None]] = []
        if is_a(function, types.FunctionType):
            self._walk_function(function, arguments)
        else:
            self._visit(function, type(function).__name__, _NO_LINE, WatchKind.WATCHED)
        for each in objects:
            self._visit(each, f"a {type(each).__name__}", _NO_LINE, WatchKind.WATCHED)
        already_read: set[tuple[Any, ...]] = set()
        while (self._pending or self._read_unnamed_attributes(already_read)) and not self._is_full:
            self._pending.pop()()
        # Stored during the walk so that no id is reused; dropped here so that arguments can be freed.
        for references in (self._visited, self._owners, self._objects, self._pending):
            references.clear()

    @property
    def _is_full(self) -> bool:
        """True once the walk has reached its limit of values or functions."""
        return len(self._slot_by_key) + len(self._visited) > MAX_VALUES or len(self._entered_code) > MAX_FUNCTIONS

    # Code -------------------------------------------------------------------------------------------------------------

    def _walk_function(self, function: Any, arguments: KnownParameters) -> None:
        """Walk through the code of a function."""
        if not is_a(function, types.FunctionType):
            return
        code, owner = function.__code__, next((value for value, _ in arguments.values()), None)
        if (code, id(owner)) in self._entered_code:
            return
        self._entered_code.add((code, id(owner)))
        # Stored so that the id in `_entered_code` is not reused.
        self._owners.append(owner)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not (is_user_file(code.co_filename) or code.co_filename == self._own_file):
            # A closure variable of a library function can be the user's, as in `optax.adam(schedule)`.
            for name, cell in cells.items():
                self._visit(make_slot(cell, None, name, _NO_LINE).value, name, _NO_LINE, WatchKind.PASSED)
            return
        reads, definition_line = reads_of(code), (code.co_filename, code.co_firstlineno)

        def line(chain: Chain) -> SourceLine:
            return code.co_filename, reads.lines.get(chain[-1]) or code.co_firstlineno

        # Other code assigned to the same function object, as by `%autoreload`, is a change too.
        self._watch_slot(function, "__code__", code.co_name, definition_line)
        named_values = {
            **self._walk_defaults(function, definition_line),
            **arguments,
            **_imported_values(reads.imported),
        }
        named_values |= {
            name: (self._watch_slot(cell, None, name, line((name,))), WatchKind.WATCHED) for name, cell in cells.items()
        }
        for chain in sorted(reads.globals | reads.free | reads.parameters):
            name = chain[0]
            if chain not in reads.globals:
                value, kind = named_values.get(name, (ABSENT, WatchKind.PASSED))
            elif name in function.__globals__:
                value, kind = (self._watch_slot(function.__globals__, name, name, line(chain[:1])), WatchKind.WATCHED)
            else:
                value, kind = vars(builtins).get(name, ABSENT), WatchKind.PASSED
            if value is ABSENT:
                self._unnamed_attributes |= {each: line((each,)) for each in chain[1:]}
            else:
                self._follow_attributes(value, chain, line, kind)
        self._unnamed_attributes |= {name: line((name,)) for name in reads.attributes}
        self._unnamed_assignments |= {name: line((name,)) for name in reads.written_attributes}
        for chain in sorted(reads.written):
            self._record_assignment(function, cells, named_values, chain, line)

    def _walk_defaults(self, function: types.FunctionType, where: SourceLine) -> dict[str, tuple[Any, WatchKind]]:
        code = function.__code__
        positional = self._watch_slot(function, "__defaults__", f"a default of {code.co_name}", where) or ()
        names = code.co_varnames[: code.co_argcount]
        defaults = dict(zip(names[len(names) - len(positional) :], positional, strict=True))
        defaults |= function.__kwdefaults__ or {}
        for name, value in defaults.items():
            self._visit(value, name, where, WatchKind.WATCHED)
        return {name: (value, WatchKind.WATCHED) for name, value in defaults.items()}

    def _record_assignment(
        self,
        function: types.FunctionType,
        cells: Mapping[str, types.CellType],
        named_values: KnownParameters,
        chain: Chain,
        line: Callable[[Chain], SourceLine],
    ) -> None:
        """Record a name or attribute that a function assigns to."""
        name, *attributes = chain
        if not attributes:
            holder, key = (cells[name], None) if name in cells else (function.__globals__, name)
            self.written_slots.append(make_slot(holder, key, name, line(chain)))
            return
        value, kind = named_values.get(name, (function.__globals__.get(name, ABSENT), WatchKind.WATCHED))
        for each in attributes[:-1]:
            value = self._read_attribute(value, each, name, _NO_LINE, WatchKind.PASSED)
        if value is not ABSENT and kind is not WatchKind.PASSED and not is_a(value, _ATOMIC_TYPES):
            holder, key = _attribute_location(value, attributes[-1])
            if holder is not None:
                self.written_slots.append(make_slot(holder, key, ".".join(chain), line(chain)))

    # Values -----------------------------------------------------------------------------------------------------------

    def _follow_attributes(
        self, value: Any, chain: Chain, line: Callable[[Chain], SourceLine], kind: WatchKind
    ) -> None:
        """Walk along a chain of attributes."""
        name = chain[0]
        for key in chain[1:]:
            name, library = f"{name}.{key}", _is_library_module(value)
            value = self._read_attribute(value, key, name, line((key,)), kind)
            kind = WatchKind.PASSED if library else kind
        self._visit(value, name, line(chain), kind, named=True)

    def _watch_slot(self, holder: Any, key: Any, name: str, where: SourceLine) -> Any:
        """Watch a slot and return its value."""
        slot_key = id(holder), key
        if slot_key not in self._slot_by_key:
            self._slot_by_key[slot_key] = slot = make_slot(holder, key, name, where, self._is_named)
            self.slots.append(slot)
        return self._slot_by_key[slot_key].value

    def _read_attribute(self, obj: Any, key: str, name: str, where: SourceLine, kind: WatchKind) -> Any:
        """Return an attribute of an object, ABSENT for none; functions found on its classes are walked through."""
        if obj is ABSENT or (is_a(obj, _ATOMIC_TYPES) and not is_a(obj, types.ModuleType)):
            return ABSENT
        # Python looks special methods up on the class, never on the object.
        holder, slot_key = (None, None) if key.startswith("__") else _attribute_location(obj, key)
        if holder is not None:
            is_node_argument = kind is WatchKind.ARGUMENT and self._is_node(obj)
            is_watched = kind is not WatchKind.PASSED and not is_node_argument and not _is_library_module(obj)
            value = (self._watch_slot if is_watched else _read_unwatched)(holder, slot_key, name, where)
            if value is not ABSENT:
                return value
        class_value = ABSENT
        for base in () if is_a(obj, (type, types.ModuleType)) else type(obj).__mro__:
            if key not in vars(base):
                continue
            value = self._watch_slot(base, key, name, where) if is_user_class(base) else vars(base)[key]
            if (function := _unwrap_function(value)) is not None:
                self._walk_method(function, obj, kind)
            elif class_value is ABSENT:
                class_value = value
        return class_value

    def _walk_method(self, function: types.FunctionType, owner: Any, kind: WatchKind) -> None:
        """Walk through a method of an object, whose first parameter is `owner`."""
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        arguments = dict.fromkeys(parameters[:1], (owner, kind))
        self._pending.append(lambda: self._walk_function(function, arguments))

    def _visit(self, value: Any, name: str, where: SourceLine, kind: WatchKind, *, named: bool = False) -> None:
        """Walk through a value.

        Args:
            value: The value.
            name: Its name in the step's code.
            where: Source line that mentions it.
            kind: Its treatment.
            named: Whether the code itself names the value.
        """
        if (generator := impure.generator_of(value)) is not None and name:
            self.generators.setdefault(name, (generator, where))
        # JAX freezes what a jitted function reads, in plain use as well.
        if value is ABSENT or is_a(value, _ATOMIC_TYPES) or is_jitted(value) or (id(value), kind) in self._visited:
            return
        self._visited[id(value), kind] = value
        if (effect := impure.effect_of(value)) is not None and named:
            self.effects.setdefault(effect, where)
        elif is_a(value, types.FunctionType):
            self._pending.append(lambda: self._walk_function(value, {}))
        elif is_a(value, types.MethodType):
            self._visit(value.__self__, name, where, kind)
            if is_a(value.__func__, types.FunctionType):
                self._walk_method(value.__func__, value.__self__, kind)
        elif is_a(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit(each, name, where, kind)
        elif is_a(value, (tuple, frozenset)) or is_container(value):
            self._walk_container(value, name, where, kind)
        elif is_a(value, type):
            for function in (vars(value).get(each) for each in _CONSTRUCTORS if is_user_class(value)):
                self._pending.append(lambda function=function: self._walk_function(function, {}))
        elif is_iterator(value):
            if named and not impure.is_file(value):
                self.iterators.setdefault(name, where)
        else:
            self._walk_object(value, name, where, kind)

    def _walk_container(self, value: Any, name: str, where: SourceLine, kind: WatchKind) -> None:
        if kind is WatchKind.PASSED and not is_a(value, (tuple, frozenset)):
            return
        slots = False
        if is_container(value):
            self.containers.append(container := make_container(value, name, where))
            slots = container.has_element_slots
        if is_a(value, np.ndarray) or len(value) > MAX_VALUES:
            return
        for key, each in list(value.items() if is_a(value, dict) else enumerate(value)):
            inner = f"{name}[{key!r}]" if is_a(key, (str, int)) else name
            if slots:
                self._watch_slot(value, key, inner, where)
            self._visit(each, inner, where, kind)

    def _walk_object(self, obj: Any, name: str, where: SourceLine, kind: WatchKind) -> None:
        """Walk through an object: its `__call__`, and all attributes of a record."""
        self._objects.append((obj, name, kind))
        self._read_attribute(obj, "__call__", f"{name}.__call__", where, kind)
        node = self._is_node(obj)
        # Library code reads attributes of these: `vars(config)`, the arrays of an NNX object, attributes behind
        # `__getattr__`.
        is_record = node or is_a(obj, _RECORD_TYPES) or is_dataclass(type(obj)) or hasattr(type(obj), "__getattr__")
        if is_record and (kind is WatchKind.WATCHED or (kind is WatchKind.ARGUMENT and not node)):
            outer_is_named, self._is_named = self._is_named, False
            for key in own_attributes(obj):
                value = self._read_attribute(obj, key, f"{name}.{key}", where, kind)
                self._visit(value, f"{name}.{key}", where, kind)
            self._is_named = outer_is_named
        elif not (is_user_class(type(obj)) or node):
            # A library object such as `jax.custom_vjp` calls the functions that it wraps.
            for key, value in own_attributes(obj).items():
                if callable(value):
                    self._visit(value, f"{name}.{key}", where, kind)

    def _read_unnamed_attributes(self, already_read: set[tuple[Any, ...]]) -> bool:
        """Read attributes of unnamed values on all objects met; return whether anything new was reached."""
        for obj, name, kind in self._objects:
            for key, where in self._unnamed_assignments.items():
                holder, slot_key = _attribute_location(obj, key)
                if (
                    kind is not WatchKind.PASSED
                    and holder is not None
                    and (id(obj), key, "written") not in already_read
                ):
                    already_read.add((id(obj), key, "written"))
                    self.written_slots.append(make_slot(holder, slot_key, f"{name}.{key}", where))
            for key, where in self._unnamed_attributes.items():
                if (id(obj), key) not in already_read:
                    already_read.add((id(obj), key))
                    value = self._read_attribute(obj, key, f"{name}.{key}", where, kind)
                    self._visit(value, f"{name}.{key}", where, kind)
        return bool(self._pending)


_NO_LINE: SourceLine = ("", 0)


def _attribute_location(obj: Any, attribute: str) -> tuple[Any, Any]:
    """Return the holder and key of an own attribute, set or not; (None, None) where the object can have none."""
    names = own_dict(obj)
    descriptor = None if is_a(obj, types.ModuleType) else dict(slots(obj)).get(attribute)
    if is_a(obj, type) or (descriptor is None and not is_a(names, dict)):
        return (obj, attribute) if is_a(obj, type) and attribute in vars(obj) else (None, None)
    return (names, attribute) if descriptor is None else (obj, descriptor)


def _read_unwatched(holder: Any, key: Any, name: str, where: SourceLine) -> Any:
    """Return the value of a slot without watching it."""
    return make_slot(holder, key, name, where).value


def _imported_values(names: Mapping[str, tuple[str, str]]) -> dict[str, tuple[Any, WatchKind]]:
    """Return the modules and attributes that code imports at run time, as far as the modules are loaded already."""
    values = {}
    for name, (module, attribute) in names.items():
        value = sys.modules.get(module if attribute else module.partition(".")[0], ABSENT)
        if value is not ABSENT:
            values[name] = (own_dict(value).get(attribute, ABSENT) if attribute else value, WatchKind.WATCHED)
    return values


def _unwrap_function(value: Any) -> types.FunctionType | None:
    """Return the function of a method, a static or class method, or a property, given as found on the class."""
    for name in ("__func__", "fget", "func"):
        if is_a(value, (staticmethod, classmethod, property, functools.cached_property)):
            value = getattr(value, name, value)
    return value if is_a(value, types.FunctionType) else None


def _is_library_module(obj: Any) -> bool:
    """Return whether an object is a module of a library; nobody rebinds the names of those."""
    return is_a(obj, types.ModuleType) and not is_user_file(own_dict(obj).get("__file__") or "<notebook>")
