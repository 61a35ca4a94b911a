"""What names stand for: functions, classes and objects, of a cell that has not run yet and of the notebook."""

import ast
import inspect
import types
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...introspect import own_dict
from .assigned import DEFS, given_to_self, parameters
from .names import called, mentioned, own_code

if TYPE_CHECKING:
    from .scopes import Names


DEFAULT = "train_step"  # what a step is called that no line names


@dataclass(frozen=True)
class Step:
    """Where the train step is bound.

    `path` is what it is called there: its name, `trainer.step`, or `self.step` of an object. `inside` are the cell's
    functions and classes around that place, the outermost first. `here` when the cell binds it. `method` when a class
    has it, for all its objects. `home` are the names that it is one of where those are not the notebook's.
    """

    path: str
    here: bool
    inside: tuple[str, ...] = ()
    method: bool = False
    home: MutableMapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def root(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """What its reader calls it; `Trainer.step` for the `self.step` of a class."""
        return f"{self.inside[-2]}{self.path[4:]}" if self._of_self else self.path

    @property
    def full(self) -> str:
        """Its name with those of the functions and classes around it: `main.step`."""
        return ".".join((*self.inside[:-2], self.name) if self._of_self else (*self.inside, self.path))

    @property
    def _of_self(self) -> bool:
        """Is it what a method gives its object?"""
        return "." in self.path and len(self.inside) > 1 and not self.method and self.root == "self"

    def part(self, name: str) -> "Step":
        return replace(self, path=f"{self.path}.{name}")


@dataclass(eq=False)
class Function:
    """What is called by a name.

    `parts` is the code that a call runs, each piece with the names that it sees; where its text is not known, `known`
    is the function itself, with the names that it sees and the object of a method. `of` are the functions that it
    wraps. `place` is None where it can't be bound: then it is inside `around`, a function of the notebook. `method`
    when its first argument is the object that it is called on.
    """

    name: str
    place: Step | None
    parts: "Sequence[tuple[Names, Sequence[ast.AST]]]" = ()
    of: "Sequence[Function]" = ()
    jitted: bool = False
    node: Any = None
    known: "tuple[Names, types.FunctionType, Object | None] | None" = None
    around: str = ""
    method: bool = False

    @property
    def own(self) -> bool:
        """Is it a function by itself, and not made of others?"""
        return isinstance(self.node, (*DEFS, ast.Lambda)) or self.known is not None

    @property
    def nullary(self) -> bool:
        """Is it known to take no arguments?"""
        if isinstance(self.node, DEFS):
            return not parameters(self.node)
        return self.known is not None and not inspect.signature(self.known[1]).parameters

    @property
    def kind(self) -> str:
        """`async` or `generator`, for functions whose call gives no results; else empty."""
        if self.known is not None:
            flags = self.known[1].__code__.co_flags
            waits = flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
            return "async" if waits else "generator" if flags & inspect.CO_GENERATOR else ""
        if isinstance(self.node, ast.AsyncFunctionDef):
            return "async"
        inside = own_code(*self.node.body) if isinstance(self.node, ast.FunctionDef) else ()
        return "generator" if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in inside) else ""

    @cached_property
    def makes(self) -> "list[list[Function]]":
        """The functions that it returns, in the order of the results; for one that makes none an empty list."""
        self.__dict__["makes"] = []  # while it is told, of a function that returns itself
        results = [result for inner in self.of for result in inner.makes]
        for names, body in self.parts if isinstance(self.node, DEFS) else ():
            for node in own_code(*body):
                if isinstance(node, ast.Return) and node.value is not None:
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    found = [names.made(value)[0] for value in values]
                    results = found if any(found) else results
        return results


@dataclass(eq=False)
class Object:
    """An object that the notebook has `held`, with its `names`, or one of a class. `place` is None without a name."""

    place: Step | None
    cls: "Class | None" = None
    held: Any = None
    names: "Names | None" = None

    def attribute(self, name: str) -> "Value":
        if self.names is None:
            return None if self.cls is None else self.cls.member(name, self)
        found = inspect.getattr_static(self.held, name, None)
        place = self.place and self.place.part(name)
        if isinstance(found, (staticmethod, classmethod)):
            return self.names.held(found.__func__, place)
        own = name in own_dict(self.held)  # else it is a method of its class
        value = self.names.held(found, place, None if own else self)
        if value is None and found is None and own:  # one of its methods gives it a value later
            of = self.names.held(type(self.held), None)
            made = of.member(name, self) if isinstance(of, Class) else None
            if isinstance(made, Function):
                return replace(made, place=None, around=type(self.held).__name__)
        return value


@dataclass(eq=False)
class Class:
    """A class by its text; `inside` as of a `Step`, None for one of the notebook."""

    node: ast.ClassDef
    names: "Names"
    inside: tuple[str, ...] | None
    place: Step | None
    _known: "dict[Any, Value]" = field(default_factory=dict)

    def attribute(self, name: str) -> "Value":
        return self.member(name, Object(None, self))

    def member(self, name: str, of: Object) -> "Value":
        """What an object has under a name: a method, or what its methods give it. A class of the cell is where both
        are bound; one of the notebook's is left as it is where the object has a name."""
        key = name, of.place, of.cls
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._member(key, name, of)
        return self._known[key]

    def _member(self, key: Any, name: str, of: Object) -> "Value":
        own = self.inside is not None or of.place is None
        for node in self._methods:
            if node.name == name:
                place = self.place if own else of.place
                at = place and replace(place.part(name), method=own)
                function = self.names.defined(node, at, self._within(node, of))
                alone = mentioned(*node.decorator_list) & {"staticmethod"}
                self._known[key] = replace(function, method=not alone)
        for node in self._methods:
            for _, value, part in given_to_self(node, name):
                self._known[key] = self._given(node, name, value, part, of, self._known[key])
        bases = (self.names.value(base) for base in self.node.bases)
        found = (base.member(name, of) for base in bases if isinstance(base, Class))
        return self._known[key] or next((value for value in found if value is not None), None)

    def _given(
        self, method: Any, name: str, value: ast.expr, part: int | None, of: Object, before: "Value"
    ) -> "Value":
        """What a method gives an object under a name that was something `before`."""
        within = self._within(method, of)
        at = of.place and of.place.part(name)
        if self.inside is not None:
            at = Step(f"{parameters(method)[0]}.{name}", True, (*self.inside, self.node.name, method.name))
        found = within.assigned(name, at, value, part)
        is_called = any(text.endswith(f".{name}") for text in called(self.node))
        if found is None and is_called and not isinstance(value, ast.Constant):
            found = Function(name, at, [(within, [value])], node=value)
        if isinstance(found, Function) and at is None:
            found = replace(found, around=f"{self.node.name}()")
        if isinstance(found, Function) and isinstance(before, Function) and before not in found.of:
            return replace(found, of=[*found.of, before])
        return found or before

    @property
    def members(self) -> list[str]:
        """The names of its methods, and of what these give an object."""
        given = (name for node in self._methods for name, _, _ in given_to_self(node))
        return list(dict.fromkeys((*(node.name for node in self._methods), *given)))

    @property
    def _methods(self) -> list[Any]:
        return [node for node in self.node.body if isinstance(node, DEFS)]

    def _within(self, method: Any, of: Object) -> "Names":
        inside = None if self.inside is None else (*self.inside, self.node.name)
        return self.names.within(method, inside, dict.fromkeys(parameters(method)[:1], of), self.node.name)


Value = Function | Object | Class | None
