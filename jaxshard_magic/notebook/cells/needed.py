"""What a cell needs of those that ran before it, statement by statement."""

import builtins
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import ModuleType, NoneType
from typing import Any

from ...introspect import is_a, static_attribute
from .statements import Calls, Statement, Unit, root_of

# What changes all that runs after it, and, of modules that are read, the attributes that do.
_SETTINGS = ("jax.config", "os.environ", "sys.path", "numpy.random.seed", "random.seed")
_SEEDS = frozenset({"seed", "manual_seed", "set_seed", "set_random_seed"})
_SETTERS = frozenset({"config", "environ", "seed", "manual_seed", "set_seed", "set_random_seed", "update"})


def needed(
    units: Sequence[Unit], names: set[str], path: str, drawn_from: Collection[str] = ()
) -> tuple[list[Statement], set[str]]:
    """All statements of the last cell, and those of the earlier ones that give the names, and what these statements
    read, the values they had before it; in the order they ran. Also the names that nothing gives a value before they
    are read. What a function reads in its body has to have its value when the function is called.

    Earlier calls of the step, which goes by the name `path`, are left out: its arguments are as they were before any.
    But for those that alone give a name its value: then these calls have been made.
    What reads one of the names `drawn_from` changes it: a generator, an iterator.
    """
    notebook, known = _Notebook(units, path, {*drawn_from}), set(units[-1].statements)
    while True:
        notebook.changeable = set().union(*(s.binds for s in known if s.defines))
        notebook.draws = any(map(notebook.is_draw, known))
        found, missing = _back(notebook, names, _Bodies(known))
        trained = (missing & notebook.by_calls) - notebook.kept
        notebook.kept |= trained
        if known.issuperset(found) and not trained:
            return found, missing - {*dir(builtins)}
        known.update(found)


def up_to_caller(units: Sequence[Unit], path: str, own: int) -> tuple[list[Unit], bool]:
    """The cells up to the one that runs the step, itself or through functions, and whether one does: its own, at `own`,
    else the last of those behind it up to where its name gets another value. A loop that was interrupted counts where
    none came to its end.

    Args:
        units: the cells that ran, in order.
        path: what the step goes by.
        own: the position of its own cell.
    """
    for each in (units, [unit.with_interrupted for unit in units]):
        if (at := _caller(each, path, own)) is not None:
            return [*units[:at], each[at]], True
    return [*units[: own + 1]], False


def _caller(units: Sequence[Unit], path: str, own: int) -> int | None:
    root = root_of(path)
    redefined = (i for i in range(own + 1, len(units)) if any(root in s.gives for s in units[i].statements))
    behind = range(own + 1, next(redefined, len(units)))
    bodies = _Bodies(s for unit in units for s in unit.statements)

    def runs(s: Statement) -> bool:
        calls = s.calls_now
        trains = any(root in bodies.of({name}) for name in calls.called - {root})
        return s.calls(path) or trains or root in calls.handed

    return next((i for i in (own, *reversed(behind)) if any(map(runs, units[i].statements))), None)


class Givers:
    """Which names the statements of these cells give a value: themselves, and through functions that they call."""

    def __init__(self, units: Iterable[Unit]):
        every = [s for unit in units for s in unit.statements]
        self._functions = set().union(*(s.binds for s in every if s.defines))
        self._later: dict[str, set[str]] = defaultdict(set)
        self._calls: dict[str, set[str]] = defaultdict(set)
        for s in every:
            for name in s.binds:
                self._later[name] |= s.binds_later
                self._calls[name] |= self._called(s.calls_later) if s.defines else s.reads

    def of(self, s: Statement, but: Callable[[str], bool] = lambda _: False) -> set[str]:
        """The names that a statement gives a value, or may give one; without those that functions give which go by a
        name that `but` says."""
        called = {name for name in self._called(s.calls_now) if not but(name)}
        return s.binds.union(
            *(self._later[name] for name in _reached(called, self._calls) & self._later.keys())
        )

    def _called(self, calls: Calls) -> set[str]:
        return calls.called | calls.handed & self._functions


def as_text(name: str, value: Any) -> str | None:
    """Python that gives a name what it has in the notebook: an import, or a plain number or text. None for what has no
    such form."""
    if is_a(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if type(value) in {bool, int, str, NoneType} or (type(value) is float and math.isfinite(value)):
        return f"{name} = {value!r}"
    read = getattr if is_a(value, type) else static_attribute
    module, own = read(value, "__module__", None), read(value, "__name__", None)
    if (
        own is None
        or module in (None, "__main__", "builtins")
        or getattr(sys.modules.get(module), own, None) is not value
    ):
        return None
    return f"from {module} import {own} as {name}"


class _Bodies:
    """What the functions of these statements read when they are called."""

    def __init__(self, statements: Iterable[Statement]):
        self.read: dict[str, set[str]] = defaultdict(set)
        self.made_of: dict[str, set[str]] = defaultdict(set)
        self._ahead: dict[str, set[str]] = {}
        statements = list(statements)
        own = set().union(*(s.binds for s in statements if not s.is_import))
        for s in statements:
            for name in s.binds | set(map(root_of, s.sets)) | (own & set(map(root_of, s.does))):
                self.read[name] |= s.reads_later
                self.made_of[name] |= s.reads_later | s.reads

    def of(self, names: set[str]) -> set[str]:
        """What may be read where these names are used: by a function itself, by those that it calls, and by those
        that a value was made of."""
        return set().union(*(self.read.get(name, set()) for name in self.behind(names)))

    @cached_property
    def _makes(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name, parts in self.made_of.items():
            for part in parts:
                found[part].add(name)
        return found

    def behind(self, names: set[str]) -> set[str]:
        """These names, and those that what they stand for was made of."""
        return _reached(names, self.made_of)

    def ahead(self, name: str) -> set[str]:
        """This name, and those that what it stands for is a part of: the other way round than `behind`."""
        if name not in self._ahead:
            self._ahead[name] = _reached({name}, self._makes)
        return self._ahead[name]


def _reached(names: set[str], links: Mapping[str, set[str]]) -> set[str]:
    seen, todo = set(names), list(names)
    while todo:
        more = links.get(todo.pop(), set()) - seen
        seen |= more
        todo += more
    return seen


class _Notebook:
    """Which statements change what is asked for. `imports`: what imported names stand for; `own`: the others that
    have a value. `changeable`: functions and classes that are needed, whose attributes count wherever they are set.
    `draws`: does something needed draw from numpy's or Python's own generator, so that all draws before count?
    `seeding`: functions that seed one. `by_calls`: names that statements bind which call the step; those that are
    `kept` are given by these."""

    def __init__(self, units: Sequence[Unit], path: str, drawn_from: set[str]):
        self.units, self.path, self.drawn_from = units, path, drawn_from
        every = [s for unit in units for s in unit.statements]
        self.imports = {name: full for s in every for name, full in s.imports.items()}
        self.own = set().union(*(s.binds for s in every)) - self.imports.keys()
        self.bodies = _Bodies(every)
        self._givers = Givers(units)
        self._given: dict[Statement, set[str]] = {}
        self.by_calls = set().union(*(s.binds for s in every if s.calls(path)))
        self.kept: set[str] = set()
        self.changeable: set[str] = set()
        self.draws = False
        self.seeding = set().union(*(s.binds for s in every if s.defines and s.called & _SEEDS))

    def given(self, s: Statement) -> set[str]:
        """The names that a statement gives a value, or may give one; functions that train are earlier calls of the
        step, and give none but in the last cell."""
        if s not in self._given:
            last = s.unit is self.units[-1]
            self._given[s] = self._givers.of(s) if last else self._givers.of(s, but=self._trains)
        return self._given[s]

    def leaves_out(self, s: Statement) -> bool:
        """Is it an earlier call of the step that gives nothing which has no other value?"""
        return s.calls(self.path) and s.binds.isdisjoint(self.kept)

    def wants(self, s: Statement, names: set[str]) -> bool:
        """Does it give one of the names a value, or change what has it: an attribute, an element, by a method, or as a
        function's argument? Does it set what all code depends on?"""
        return (
            bool(self.given(s) & names)
            or any(root in self.changeable or self._held(root, names) for root in map(root_of, s.sets))
            or "*" in s.binds
            or bool(s.reads & names & self.drawn_from)
            or any(map(self._is_setting, s.sets + s.does))
            or any(self._changes(called, names) or root_of(called) in self.seeding for called in s.does)
            or (self.draws and self.is_draw(s))
            or any(
                any(self._held(name, names) for name in given) and self._may_fill(function)
                for function, given in s.hands
            )
        )

    def is_draw(self, s: Statement) -> bool:
        """Does it draw from numpy's or Python's own generator when it runs?"""
        full = (self.imports.get(root_of(c), "") + c[len(root_of(c)) :] for c in s.ran)
        return any(c.startswith(("numpy.random.", "random.")) for c in full)

    def _is_setting(self, path: str) -> bool:
        root, dot, rest = path.partition(".")
        full = self.imports.get(root, root) + dot + rest
        return root in self.imports and any(f"{full}.".startswith(f"{setting}.") for setting in _SETTINGS)

    def _changes(self, called: str, names: set[str]) -> bool:
        root, *attributes = called.split(".")
        return self._held(root, names) and bool(
            _SETTERS & {*attributes} if root in self.imports else attributes
        )

    def _held(self, name: str, names: set[str]) -> bool:
        """Is it one of the names, or a part of what one of them stands for?"""
        return name in names or (name not in self.imports and not names.isdisjoint(self.bodies.ahead(name)))

    def _may_fill(self, function: str) -> bool:
        """The user's functions may change their arguments; those that train are earlier calls of the step."""
        return function in self.own and not self._trains(function)

    def _trains(self, function: str) -> bool:
        """Does a function come to the step?"""
        return root_of(self.path) in self.bodies.of({function})


def _back(notebook: _Notebook, names: set[str], bodies: _Bodies) -> tuple[list[Statement], set[str]]:
    """The statements that are needed, from the last to the first, and the names that are missing."""
    last, found = notebook.units[-1], []
    wanted = names | bodies.of(names.union(*(s.binds for s in last.statements)))
    missing = set(names)
    for unit in reversed(notebook.units):
        for s in reversed(unit.statements):
            left_out = unit is not last and (notebook.leaves_out(s) or not notebook.wants(s, wanted))
            if not (left_out or s.is_magic):
                found.append(s)
                wanted = (wanted - s.gives) | s.reads | bodies.of(s.reads)
                missing = missing - notebook.given(s) - _starred(s) | s.reads
    later = set().union(*(s.reads_later for s in found))
    given = set().union(*(notebook.given(s) | _starred(s) for s in found))
    return found[::-1], missing | (later - given)


def _starred(s: Statement) -> set[str]:
    """What `from ... import *` gives."""
    module = sys.modules.get(s.imports.get("*", "").removesuffix(".*"))
    public = (name for name in vars(module) if not name.startswith("_")) if module else ()
    return set(getattr(module, "__all__", public))
