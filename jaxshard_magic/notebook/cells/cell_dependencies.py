"""Statements of earlier cells that a cell depends on."""

import builtins
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import ModuleType, NoneType
from typing import Any

from ...introspect import is_a, static_attribute
from .statements import CallNames, ExecutedCell, Statement, root_of

# A change of a setting or a seed affects all later code; of a module only these attributes change it.
_SETTINGS = ("jax.config", "os.environ", "sys.path", "numpy.random.seed", "random.seed")
_SEEDS = frozenset({"seed", "manual_seed", "set_seed", "set_random_seed"})
_SETTERS = frozenset({"config", "environ", "seed", "manual_seed", "set_seed", "set_random_seed", "update"})


def required_statements(
    units: Sequence[ExecutedCell], names: set[str], path: str, stateful_names: Collection[str] = ()
) -> tuple[list[Statement], set[str]]:
    """Return the statements that a cell depends on: a backward slice through the cells run.

    The slice has all statements of the last cell, and earlier statements that bind or change the names needed, with the
    values at that time. A function body's names need values when the function is called.

    Earlier calls of the step are left out, since the step's arguments are wanted as before any call. A call that alone
    binds a name is kept: then these calls have been made.

    Args:
        units: Cells in the order of their runs.
        names: Names needed by the last cell.
        path: Name of the step.
        stateful_names: Names changed by reading: generators, iterators.

    Returns:
        Statements in the order of their runs, and the names read before any statement binds them.
    """
    notebook, known = _Notebook(units, path, {*stateful_names}), set(units[-1].statements)
    # To a fixpoint: functions and random draws found in one pass make further statements necessary in the next.
    while True:
        notebook.changeable = set().union(*(s.binds for s in known if s.defines))
        notebook.draws = any(map(notebook.is_draw, known))
        found, missing = _backward_slice(notebook, names, _Bodies(known))
        # Names bound by nothing but calls of the step: these calls have to stay.
        trained = (missing & notebook.by_calls) - notebook.kept
        notebook.kept |= trained
        if known.issuperset(found) and not trained:
            return found, missing - {*dir(builtins)}
        known.update(found)


def cells_up_to_call(units: Sequence[ExecutedCell], path: str, own: int) -> tuple[list[ExecutedCell], bool]:
    """Return the cells up to the one that calls the step, directly or through functions, and whether there is one.

    The step's own cell counts first, then the last of the cells behind, up to a new value for the step's name. An
    interrupted loop counts if no loop ran to the end.

    Args:
        units: Cells in the order of their runs.
        path: Name of the step.
        own: Position of the step's own cell.
    """
    for each in (units, [unit.with_interrupted for unit in units]):
        if (at := _caller(each, path, own)) is not None:
            return [*units[:at], each[at]], True
    return [*units[: own + 1]], False


def _caller(units: Sequence[ExecutedCell], path: str, own: int) -> int | None:
    """Return the position of the cell that calls the step; None without any."""
    root = root_of(path)
    # After a new value of the name, calls are of another function.
    redefined = (i for i in range(own + 1, len(units)) if any(root in s.always_binds for s in units[i].statements))
    behind = range(own + 1, next(redefined, len(units)))
    bodies = _Bodies(s for unit in units for s in unit.statements)

    def runs(s: Statement) -> bool:
        calls = s.calls_now
        trains = any(root in bodies.of({name}) for name in calls.called - {root})
        return s.calls(path) or trains or root in calls.handed

    return next((i for i in (own, *reversed(behind)) if any(map(runs, units[i].statements))), None)


class AssignedNames:
    """Names bound by statements, directly and through called functions.

    Args:
        units: Cells run.
    """

    def __init__(self, units: Iterable[ExecutedCell]):
        every = [s for unit in units for s in unit.statements]
        self._functions = set().union(*(s.binds for s in every if s.defines))
        self._later: dict[str, set[str]] = defaultdict(set)
        self._calls: dict[str, set[str]] = defaultdict(set)
        for s in every:
            for name in s.binds:
                self._later[name] |= s.binds_later
                self._calls[name] |= self._called(s.calls_later) if s.defines else s.reads

    def of(self, s: Statement, but: Callable[[str], bool] = lambda _: False) -> set[str]:
        """Return the names that a statement binds or may bind.

        Args:
            s: Statement.
            but: Predicate on function names; bindings by these functions are left out.
        """
        called = {name for name in self._called(s.calls_now) if not but(name)}
        return s.binds.union(
            *(self._later[name] for name in _transitive_closure(called, self._calls) & self._later.keys())
        )

    def _called(self, calls: CallNames) -> set[str]:
        return calls.called | calls.handed & self._functions


def as_source(name: str, value: Any) -> str | None:
    """Return Python code that gives a name its present value; None for values without such code.

    Code exists for modules, functions and classes of modules, and plain numbers, texts and None.
    """
    if is_a(value, ModuleType):
        return f"import {value.__name__} as {name}"
    # Exact types: the repr of a subclass need not be Python code.
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
    """Names read by functions when called.

    Attributes:
        read: By name, the names read later, when the named function is called.
        made_of: By name, all names that the value was made of.
    """

    def __init__(self, statements: Iterable[Statement]):
        self.read: dict[str, set[str]] = defaultdict(set)
        self.made_of: dict[str, set[str]] = defaultdict(set)
        self._ahead: dict[str, set[str]] = {}
        statements = list(statements)
        own = set().union(*(s.binds for s in statements if not s.is_import))
        for s in statements:
            # A value is also made of what the statements that change it read.
            for name in s.binds | set(map(root_of, s.mutates)) | (own & set(map(root_of, s.effect_calls))):
                self.read[name] |= s.reads_later
                self.made_of[name] |= s.reads_later | s.reads

    def of(self, names: set[str]) -> set[str]:
        """Return the names that may be read when `names` are used: by functions, by functions called there, and by
        values made of functions."""
        return set().union(*(self.read.get(name, set()) for name in self.behind(names)))

    @cached_property
    def _makes(self) -> dict[str, set[str]]:
        """Names that each name is a part of: `made_of`, inverted."""
        found: dict[str, set[str]] = defaultdict(set)
        for name, parts in self.made_of.items():
            for part in parts:
                found[part].add(name)
        return found

    def behind(self, names: set[str]) -> set[str]:
        """Return `names` and all names that their values were made of."""
        return _transitive_closure(names, self.made_of)

    def ahead(self, name: str) -> set[str]:
        """Return `name` and all names whose values were made of its value."""
        if name not in self._ahead:
            self._ahead[name] = _transitive_closure({name}, self._makes)
        return self._ahead[name]


def _transitive_closure(names: set[str], links: Mapping[str, set[str]]) -> set[str]:
    """Return all names reachable from `names` along `links`."""
    seen, todo = set(names), list(names)
    while todo:
        more = links.get(todo.pop(), set()) - seen
        seen |= more
        todo += more
    return seen


class _Notebook:
    """Tests for statements that a backward slice has to keep.

    Attributes:
        imports: Full names of imported names.
        own: Other names with a value.
        by_calls: Names bound by statements that call the step.
        kept: Names of `by_calls` whose binding calls stay in the slice.
        changeable: Functions and classes in the slice; assignments to their attributes count everywhere.
        draws: Whether the slice draws from the global generators of numpy or Python; then all earlier draws count.
        seeding: Functions that seed a global generator.
    """

    def __init__(self, units: Sequence[ExecutedCell], path: str, drawn_from: set[str]):
        self.units, self.path, self.drawn_from = units, path, drawn_from
        every = [s for unit in units for s in unit.statements]
        self.imports = {name: full for s in every for name, full in s.imports.items()}
        self.own = set().union(*(s.binds for s in every)) - self.imports.keys()
        self.bodies = _Bodies(every)
        self._givers = AssignedNames(units)
        self._given: dict[Statement, set[str]] = {}
        self.by_calls = set().union(*(s.binds for s in every if s.calls(path)))
        self.kept: set[str] = set()
        self.changeable: set[str] = set()
        self.draws = False
        self.seeding = set().union(*(s.binds for s in every if s.defines and s.called & _SEEDS))

    def given(self, s: Statement) -> set[str]:
        """Return the names that a statement binds or may bind.

        Functions that train count as earlier calls of the step, and bind nothing outside the last cell.
        """
        if s not in self._given:
            last = s.unit is self.units[-1]
            self._given[s] = self._givers.of(s) if last else self._givers.of(s, but=self._trains)
        return self._given[s]

    def leaves_out(self, s: Statement) -> bool:
        """Return whether a statement is an earlier call of the step, and binds no name without another value."""
        return s.calls(self.path) and s.binds.isdisjoint(self.kept)

    def is_required(self, s: Statement, names: set[str]) -> bool:
        """Return whether a statement binds or changes one of the names, or a setting of all code.

        A value is changed through an attribute, an element, a method, or as a function's argument.
        """
        return (
            bool(self.given(s) & names)
            or any(root in self.changeable or self._held(root, names) for root in map(root_of, s.mutates))
            or "*" in s.binds
            or bool(s.reads & names & self.drawn_from)
            or any(map(self._is_setting, s.mutates + s.effect_calls))
            or any(self._changes(called, names) or root_of(called) in self.seeding for called in s.effect_calls)
            or (self.draws and self.is_draw(s))
            or any(
                any(self._held(name, names) for name in given) and self._may_fill(function)
                for function, given in s.effect_arguments
            )
        )

    def is_draw(self, s: Statement) -> bool:
        """Return whether a statement draws from the global generators of numpy or Python."""
        full = (self.imports.get(root_of(c), "") + c[len(root_of(c)) :] for c in s.called_paths)
        return any(c.startswith(("numpy.random.", "random.")) for c in full)

    def _is_setting(self, path: str) -> bool:
        """Return whether a path belongs to a global setting such as `jax.config`."""
        root, dot, rest = path.partition(".")
        full = self.imports.get(root, root) + dot + rest
        return root in self.imports and any(f"{full}.".startswith(f"{setting}.") for setting in _SETTINGS)

    def _changes(self, called: str, names: set[str]) -> bool:
        """Return whether a method call may change one of the names."""
        root, *attributes = called.split(".")
        return self._held(root, names) and bool(_SETTERS & {*attributes} if root in self.imports else attributes)

    def _held(self, name: str, names: set[str]) -> bool:
        """Return whether `name` is one of the names, or a part of one's value."""
        return name in names or (name not in self.imports and not names.isdisjoint(self.bodies.ahead(name)))

    def _may_fill(self, function: str) -> bool:
        """Return whether a function may change its arguments. True for functions of the user, except for functions that
        call the step: their calls are left out as earlier calls of the step."""
        return function in self.own and not self._trains(function)

    def _trains(self, function: str) -> bool:
        """Return whether a function calls the step."""
        return root_of(self.path) in self.bodies.of({function})


def _backward_slice(notebook: _Notebook, names: set[str], bodies: _Bodies) -> tuple[list[Statement], set[str]]:
    """Return the needed statements in order, and the names without a binding."""
    last, statements = notebook.units[-1], []
    needed_names = names | bodies.of(names.union(*(s.binds for s in last.statements)))
    missing = set(names)
    for unit in reversed(notebook.units):
        for s in reversed(unit.statements):
            left_out = unit is not last and (notebook.leaves_out(s) or not notebook.is_required(s, needed_names))
            # A magic has no meaning outside IPython.
            if not (left_out or s.is_magic):
                statements.append(s)
                needed_names = (needed_names - s.always_binds) | s.reads | bodies.of(s.reads)
                missing = missing - notebook.given(s) - _starred(s) | s.reads
    later = set().union(*(s.reads_later for s in statements))
    given = set().union(*(notebook.given(s) | _starred(s) for s in statements))
    return statements[::-1], missing | (later - given)


def _starred(s: Statement) -> set[str]:
    """Return the names bound by `from ... import *`."""
    module = sys.modules.get(s.imports.get("*", "").removesuffix(".*"))
    public = (name for name in vars(module) if not name.startswith("_")) if module else ()
    return set(getattr(module, "__all__", public))
