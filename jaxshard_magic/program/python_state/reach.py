"""The slots, containers and generators that a step's code reaches.

A walk from the step's function over the names in its code and in that of the user's functions among their values. An
attribute is read where its object is known (`self.rate`, `config.rate`). One of a call's result or of an element is
read on every object that the walk meets.
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
from ..lines import is_users, is_users_class
from ..unwrap import is_jitted
from . import impure
from .slots import ABSENT, Container, Slot, Where, container_of, is_container, slot_of

MOST_FUNCTIONS = 500
MOST_PLACES = 20_000

_PLAIN = (
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
_RECORDS = (
    types.SimpleNamespace,
    Namespace,
    UserDict,
)  # read as a whole, as in `vars(config)`; dataclasses, too
_MADE_BY = ("__init__", "__post_init__", "setup")  # what Python or Flax runs where a class is called


class Kind(Enum):
    """How the walk looks at a value.

    Attributes:
        WATCHED: The notebook or the step's object keeps it: whatever is read of it may change between calls.
        ARGUMENT: An NNX object that the step is given. Its arrays are inputs, and its attributes are compared as such;
            but what other objects among those hold may change.
        PASSED: A pytree that the step is given, all inputs; but it may bring functions along.
    """

    WATCHED = 0
    ARGUMENT = 1
    PASSED = 2


Given = Mapping[str, tuple[Any, Kind]]  # the parameters of a function whose values are known


class Reach:
    """What a step's code reaches.

    Args:
        function: the step's own.
        given: its arguments, by the names of its parameters.
        objects: Python objects in the arguments, which the program is made for.
        is_node: whether an object is of NNX, whose arrays its library reads.

    Attributes:
        slots: Values that it reads. `written`: those that it gives a value, read or not.
        containers: Lists, dicts, sets and arrays whose values it may read.
        generators: Generators of random numbers by their names, each with a line that mentions it.
        iterators: Names of iterators, each with a line. `effects`: what a trace does once, in words, the same way.
    """

    def __init__(self, function: Any, given: Given, objects: Iterable[Any], is_node: Callable[[Any], bool]):
        self._is_node = is_node
        self._own_file = function.__code__.co_filename if is_a(function, types.FunctionType) else ""
        self.slots: list[Slot] = []
        self.written: list[Slot] = []
        self.containers: list[Container] = []
        self.generators: dict[str, tuple[Any, Where]] = {}
        self.iterators: dict[str, Where] = {}
        self.effects: dict[str, Where] = {}
        self._slots: dict[tuple[int, Any], Slot] = {}
        self._met: dict[
            tuple[int, Kind], Any
        ] = {}  # values, by ids that stay theirs as long as they are here
        self._entered: set[tuple[types.CodeType, int]] = set()
        self._owners: list[Any] = []  # of methods that were entered, by their ids
        self._objects: list[tuple[Any, str, Kind]] = []
        self._unnamed: dict[str, Where] = {}  # attributes of what has no name
        self._unnamed_written: dict[str, Where] = {}
        self._said = True  # whether the code names what is met now
        self._todo: list[Callable[[], None]] = []
        if is_a(function, types.FunctionType):
            self._function(function, given)
        else:
            self._visit(function, type(function).__name__, _NOWHERE, Kind.WATCHED)
        for each in objects:
            self._visit(each, f"a {type(each).__name__}", _NOWHERE, Kind.WATCHED)
        asked: set[tuple[Any, ...]] = set()
        while (self._todo or self._ask_objects(asked)) and not self._full:
            self._todo.pop()()
        for kept in (self._met, self._owners, self._objects, self._todo):  # no argument lives on for this
            kept.clear()

    @property
    def _full(self) -> bool:
        """Whether there is more than is looked at."""
        return len(self._slots) + len(self._met) > MOST_PLACES or len(self._entered) > MOST_FUNCTIONS

    # Code -------------------------------------------------------------------------------------------------------------

    def _function(self, function: Any, given: Given) -> None:
        """Take what a function reads."""
        if not is_a(function, types.FunctionType):
            return
        code, owner = function.__code__, next((value for value, _ in given.values()), None)
        if (code, id(owner)) in self._entered:
            return
        self._entered.add((code, id(owner)))
        self._owners.append(owner)
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if not (is_users(code.co_filename) or code.co_filename == self._own_file):
            # What a library's function closes over may be the user's: `optax.adam(schedule)`.
            for name, cell in cells.items():
                self._visit(slot_of(cell, None, name, _NOWHERE).value, name, _NOWHERE, Kind.PASSED)
            return
        reads, first = reads_of(code), (code.co_filename, code.co_firstlineno)

        def line(chain: Chain) -> Where:
            return code.co_filename, reads.lines.get(chain[-1]) or code.co_firstlineno

        self._slot(function, "__code__", code.co_name, first)
        known = {**self._defaults(function, first), **given, **_imported(reads.imported)}
        known |= {
            name: (self._slot(cell, None, name, line((name,))), Kind.WATCHED) for name, cell in cells.items()
        }
        for chain in sorted(reads.globals | reads.free | reads.parameters):
            name = chain[0]
            if chain not in reads.globals:
                value, kind = known.get(name, (ABSENT, Kind.PASSED))
            elif name in function.__globals__:
                value, kind = self._slot(function.__globals__, name, name, line(chain[:1])), Kind.WATCHED
            else:
                value, kind = vars(builtins).get(name, ABSENT), Kind.PASSED
            if value is ABSENT:
                self._unnamed |= {each: line((each,)) for each in chain[1:]}
            else:
                self._follow(value, chain, line, kind)
        self._unnamed |= {name: line((name,)) for name in reads.attributes}
        self._unnamed_written |= {name: line((name,)) for name in reads.written_attributes}
        for chain in sorted(reads.written):
            self._write(function, cells, known, chain, line)

    def _defaults(self, function: types.FunctionType, where: Where) -> dict[str, tuple[Any, Kind]]:
        code = function.__code__
        positional = self._slot(function, "__defaults__", f"a default of {code.co_name}", where) or ()
        names = code.co_varnames[: code.co_argcount]
        found = dict(zip(names[len(names) - len(positional) :], positional, strict=True))
        found |= function.__kwdefaults__ or {}
        for name, value in found.items():
            self._visit(value, name, where, Kind.WATCHED)
        return {name: (value, Kind.WATCHED) for name, value in found.items()}

    def _write(
        self,
        function: types.FunctionType,
        cells: Mapping[str, types.CellType],
        known: Given,
        chain: Chain,
        line: Callable[[Chain], Where],
    ) -> None:
        """Take a name or an attribute that a function gives a value."""
        name, *attributes = chain
        if not attributes:
            holder, key = (cells[name], None) if name in cells else (function.__globals__, name)
            self.written.append(slot_of(holder, key, name, line(chain)))
            return
        value, kind = known.get(name, (function.__globals__.get(name, ABSENT), Kind.WATCHED))
        for each in attributes[:-1]:
            value = self._attribute(value, each, name, _NOWHERE, Kind.PASSED)
        if value is not ABSENT and kind is not Kind.PASSED and not is_a(value, _PLAIN):
            holder, key = _place_of(value, attributes[-1])
            if holder is not None:
                self.written.append(slot_of(holder, key, ".".join(chain), line(chain)))

    # Values -----------------------------------------------------------------------------------------------------------

    def _follow(self, value: Any, chain: Chain, line: Callable[[Chain], Where], kind: Kind) -> None:
        """Take what a chain of attributes leads to."""
        name = chain[0]
        for key in chain[1:]:
            name, library = f"{name}.{key}", _is_library(value)
            value = self._attribute(value, key, name, line((key,)), kind)
            kind = Kind.PASSED if library else kind
        self._visit(value, name, line(chain), kind, named=True)

    def _slot(self, holder: Any, key: Any, name: str, where: Where) -> Any:
        """Watch a value's place; the value."""
        at = id(holder), key
        if at not in self._slots:
            self._slots[at] = slot = slot_of(holder, key, name, where, self._said)
            self.slots.append(slot)
        return self._slots[at].value

    def _attribute(self, obj: Any, key: str, name: str, where: Where, kind: Kind) -> Any:
        """Return an attribute of what the walk has met, ABSENT for none; methods are entered."""
        if obj is ABSENT or (is_a(obj, _PLAIN) and not is_a(obj, types.ModuleType)):
            return ABSENT
        holder, at = (
            (None, None) if key.startswith("__") else _place_of(obj, key)
        )  # Python asks the class for these
        if holder is not None:
            given = kind is Kind.ARGUMENT and self._is_node(obj)
            watched = kind is not Kind.PASSED and not given and not _is_library(obj)
            value = (self._slot if watched else _value)(holder, at, name, where)
            if value is not ABSENT:
                return value
        found = ABSENT
        for base in () if is_a(obj, (type, types.ModuleType)) else type(obj).__mro__:
            if key not in vars(base):
                continue
            value = self._slot(base, key, name, where) if is_users_class(base) else vars(base)[key]
            if (function := _function_of(value)) is not None:
                self._enter(function, obj, kind)
            elif found is ABSENT:
                found = value
        return found

    def _enter(self, function: types.FunctionType, owner: Any, kind: Kind) -> None:
        """Walk through a method of an object."""
        parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
        given = dict.fromkeys(parameters[:1], (owner, kind))
        self._todo.append(lambda: self._function(function, given))

    def _visit(self, value: Any, name: str, where: Where, kind: Kind, *, named: bool = False) -> None:
        """Take what a value brings along. `named`: the code itself names it."""
        if (generator := impure.generator_of(value)) is not None and name:
            self.generators.setdefault(name, (generator, where))
        if value is ABSENT or is_a(value, _PLAIN) or is_jitted(value) or (id(value), kind) in self._met:
            return
        self._met[id(value), kind] = value
        if (effect := impure.effect_of(value)) is not None and named:
            self.effects.setdefault(effect, where)
        elif is_a(value, types.FunctionType):
            self._todo.append(lambda: self._function(value, {}))
        elif is_a(value, types.MethodType):
            self._visit(value.__self__, name, where, kind)
            if is_a(value.__func__, types.FunctionType):
                self._enter(value.__func__, value.__self__, kind)
        elif is_a(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit(each, name, where, kind)
        elif is_a(value, (tuple, frozenset)) or is_container(value):
            self._container(value, name, where, kind)
        elif is_a(value, type):
            for function in (vars(value).get(each) for each in _MADE_BY if is_users_class(value)):
                self._todo.append(lambda function=function: self._function(function, {}))
        elif is_iterator(value):
            if named and not impure.is_file(value):
                self.iterators.setdefault(name, where)
        else:
            self._object(value, name, where, kind)

    def _container(self, value: Any, name: str, where: Where, kind: Kind) -> None:
        if kind is Kind.PASSED and not is_a(value, (tuple, frozenset)):
            return
        slots = False
        if is_container(value):
            self.containers.append(found := container_of(value, name, where))
            slots = found.elements
        if is_a(value, np.ndarray) or len(value) > MOST_PLACES:
            return
        for key, each in list(value.items() if is_a(value, dict) else enumerate(value)):
            inner = f"{name}[{key!r}]" if is_a(key, (str, int)) else name
            if slots:
                self._slot(value, key, inner, where)
            self._visit(each, inner, where, kind)

    def _object(self, obj: Any, name: str, where: Where, kind: Kind) -> None:
        """Take an object: what it does when it is called, and of a record everything."""
        self._objects.append((obj, name, kind))
        self._attribute(obj, "__call__", f"{name}.__call__", where, kind)
        node = self._is_node(obj)
        # Read by other code than its own: `vars(config)`, the arrays of an NNX object, what `__getattr__` gives.
        whole = node or is_a(obj, _RECORDS) or is_dataclass(type(obj)) or hasattr(type(obj), "__getattr__")
        if whole and (kind is Kind.WATCHED or (kind is Kind.ARGUMENT and not node)):
            said, self._said = self._said, False
            for key in own_attributes(obj):
                value = self._attribute(obj, key, f"{name}.{key}", where, kind)
                self._visit(value, f"{name}.{key}", where, kind)
            self._said = said
        elif not (is_users_class(type(obj)) or node):
            # Of a library's object, such as `jax.custom_vjp`, the functions that it wraps.
            for key, value in own_attributes(obj).items():
                if callable(value):
                    self._visit(value, f"{name}.{key}", where, kind)

    def _ask_objects(self, asked: set[tuple[Any, ...]]) -> bool:
        """Read the attributes without a name on the objects that were met; whether that led to anything new."""
        for obj, name, kind in self._objects:
            for key, where in self._unnamed_written.items():
                holder, at = _place_of(obj, key)
                if kind is not Kind.PASSED and holder is not None and (id(obj), key, "written") not in asked:
                    asked.add((id(obj), key, "written"))
                    self.written.append(slot_of(holder, at, f"{name}.{key}", where))
            for key, where in self._unnamed.items():
                if (id(obj), key) not in asked:
                    asked.add((id(obj), key))
                    value = self._attribute(obj, key, f"{name}.{key}", where, kind)
                    self._visit(value, f"{name}.{key}", where, kind)
        return bool(self._todo)


_NOWHERE: Where = ("", 0)


def _place_of(obj: Any, attribute: str) -> tuple[Any, Any]:
    """Return the holder and the key of an object's own attribute, set or not; None for one that can have none."""
    names = own_dict(obj)
    descriptor = None if is_a(obj, types.ModuleType) else dict(slots(obj)).get(attribute)
    if is_a(obj, type) or (descriptor is None and not is_a(names, dict)):
        return (obj, attribute) if is_a(obj, type) and attribute in vars(obj) else (None, None)
    return (names, attribute) if descriptor is None else (obj, descriptor)


def _value(holder: Any, key: Any, name: str, where: Where) -> Any:
    """Return what a place holds, and watch it not."""
    return slot_of(holder, key, name, where).value


def _imported(names: Mapping[str, tuple[str, str]]) -> dict[str, tuple[Any, Kind]]:
    """Return the modules that code imports when it runs, and what it takes from them: those that are loaded."""
    found = {}
    for name, (module, attribute) in names.items():
        value = sys.modules.get(module if attribute else module.partition(".")[0], ABSENT)
        if value is not ABSENT:
            found[name] = (own_dict(value).get(attribute, ABSENT) if attribute else value, Kind.WATCHED)
    return found


def _function_of(value: Any) -> types.FunctionType | None:
    """Return the function of a method, a static or class method, or a property, as its class has it."""
    for name in ("__func__", "fget", "func"):
        if is_a(value, (staticmethod, classmethod, property, functools.cached_property)):
            value = getattr(value, name, value)
    return value if is_a(value, types.FunctionType) else None


def _is_library(obj: Any) -> bool:
    """Return whether an object is a module of a library, whose names nobody rebinds."""
    return is_a(obj, types.ModuleType) and not is_users(own_dict(obj).get("__file__") or "<notebook>")
