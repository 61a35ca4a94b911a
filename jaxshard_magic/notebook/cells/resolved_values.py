"""Values of names: functions, classes and objects, of a cell before its run and of the notebook."""

import ast
import inspect
import types
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...introspect import own_dict
from .assignments import DEFS, parameters, self_attributes
from .names import called_names, mentioned_names, nodes_outside_definitions

if TYPE_CHECKING:
    from .scopes import NameScope


DEFAULT = "train_step"  # name of a step, unless the line gives another


@dataclass(frozen=True)
class StepLocation:
    """Location to bind the train step at.

    Attributes:
        path: Name there: a variable, `trainer.step`, or `self.step` in a class.
        in_cell: Whether the cell binds the name.
        inside: Functions and classes of the cell around the location, outermost first.
        method: Whether the step is a method in a class, for all its objects.
        home: Namespace of the name; None for the notebook's.
    """

    path: str
    in_cell: bool
    inside: tuple[str, ...] = ()
    method: bool = False
    home: MutableMapping[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def root(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Name for the reader; `Trainer.step` for the `self.step` of a class."""
        return f"{self.inside[-2]}{self.path[4:]}" if self._of_self else self.path

    @property
    def full(self) -> str:
        """Name with the enclosing functions and classes: `main.step`."""
        return ".".join((*self.inside[:-2], self.name) if self._of_self else (*self.inside, self.path))

    @property
    def _of_self(self) -> bool:
        """True if a method assigns the step to `self`."""
        return "." in self.path and len(self.inside) > 1 and not self.method and self.root == "self"

    def part(self, name: str) -> "StepLocation":
        """Return the location of an attribute of the object here."""
        return replace(self, path=f"{self.path}.{name}")


@dataclass(eq=False)
class FunctionValue:
    """Function under a name.

    Attributes:
        name: Name.
        place: Location to bind a step at; None if binding is not possible.
        parts: Code run by a call, each piece with its scope; empty without source.
        wrapped: Functions wrapped by this function.
        jitted: Whether the function is jitted.
        node: Syntax tree; None if unknown.
        compiled: Scope, function object and receiver of a function of the notebook; None for a function of the cell.
        around: Function of the notebook that holds a function without a location.
        method: Whether the first argument is the receiver.
    """

    name: str
    place: StepLocation | None
    parts: "Sequence[tuple[NameScope, Sequence[ast.AST]]]" = ()
    wrapped: "Sequence[FunctionValue]" = ()
    jitted: bool = False
    node: Any = None
    compiled: "tuple[NameScope, types.FunctionType, ObjectValue | None] | None" = None
    around: str = ""
    method: bool = False

    @property
    def own(self) -> bool:
        """True for a function by itself, False for one made of others."""
        return isinstance(self.node, (*DEFS, ast.Lambda)) or self.compiled is not None

    @property
    def nullary(self) -> bool:
        """True if the function is known to take no arguments."""
        if isinstance(self.node, DEFS):
            return not parameters(self.node)
        return self.compiled is not None and not inspect.signature(self.compiled[1]).parameters

    @property
    def kind(self) -> str:
        """`async` or `generator` for functions whose call returns no results; else empty."""
        if self.compiled is not None:
            flags = self.compiled[1].__code__.co_flags
            waits = flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)
            return "async" if waits else "generator" if flags & inspect.CO_GENERATOR else ""
        if isinstance(self.node, ast.AsyncFunctionDef):
            return "async"
        inside = nodes_outside_definitions(*self.node.body) if isinstance(self.node, ast.FunctionDef) else ()
        return "generator" if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in inside) else ""

    @cached_property
    def makes(self) -> "list[list[FunctionValue]]":
        """Returned functions, in the order of the results; empty if no functions are returned."""
        self.__dict__["makes"] = []  # until known: a function may return itself
        results = [result for inner in self.wrapped for result in inner.makes]
        for names, body in self.parts if isinstance(self.node, DEFS) else ():
            for node in nodes_outside_definitions(*body):
                if isinstance(node, ast.Return) and node.value is not None:
                    values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                    found = [names.functions_from(value)[0] for value in values]
                    results = found if any(found) else results
        return results


@dataclass(eq=False)
class ObjectValue:
    """Object of the notebook, or of a class known by its source.

    Attributes:
        place: Location; None without a name.
        cls: Class of an object not made yet.
        held: Object of the notebook.
        names: Scope of the object of the notebook.
    """

    place: StepLocation | None
    cls: "ClassValue | None" = None
    held: Any = None
    names: "NameScope | None" = None

    def attribute(self, name: str) -> "Value":
        """Return the value of an attribute; None if unknown."""
        if self.names is None:
            return None if self.cls is None else self.cls.member(name, self)
        # Static, so that no property runs the user's code.
        found = inspect.getattr_static(self.held, name, None)
        place = self.place and self.place.part(name)
        if isinstance(found, (staticmethod, classmethod)):
            return self.names.resolve_object(found.__func__, place)
        own = name in own_dict(self.held)  # otherwise a method of its class
        value = self.names.resolve_object(found, place, None if own else self)
        if value is None and found is None and own:  # a method assigns it later
            of = self.names.resolve_object(type(self.held), None)
            made = of.member(name, self) if isinstance(of, ClassValue) else None
            if isinstance(made, FunctionValue):
                return replace(made, place=None, around=type(self.held).__name__)
        return value


@dataclass(eq=False)
class ClassValue:
    """Class known by its source.

    Attributes:
        node: `class` statement.
        names: Scope of the statement.
        inside: Enclosing functions and classes of the cell; None for a class of the notebook.
        place: Location; None without a name.
    """

    node: ast.ClassDef
    names: "NameScope"
    inside: tuple[str, ...] | None
    place: StepLocation | None
    _known: "dict[Any, Value]" = field(default_factory=dict)

    def attribute(self, name: str) -> "Value":
        return self.member(name, ObjectValue(None, self))

    def member(self, name: str, of: ObjectValue) -> "Value":
        """Return a method, or an attribute assigned by methods.

        In a class of the cell, steps are bound in the class. A class of the notebook stays unchanged if the object has
        a name: then the object's attribute is bound.

        Args:
            name: Name of the attribute.
            of: Receiver.
        """
        key = name, of.place, of.cls
        if key not in self._known:
            # Unknown meanwhile: an attribute may be computed from itself.
            self._known[key] = None
            self._known[key] = self._member(key, name, of)
        return self._known[key]

    def _member(self, key: Any, name: str, of: ObjectValue) -> "Value":
        own = self.inside is not None or of.place is None
        for node in self._methods:
            if node.name == name:
                place = self.place if own else of.place
                at = place and replace(place.part(name), method=own)
                function = self.names.defined(node, at, self._within(node, of))
                alone = mentioned_names(*node.decorator_list) & {"staticmethod"}
                self._known[key] = replace(function, method=not alone)
        for node in self._methods:
            for _, value, part in self_attributes(node, name):
                self._known[key] = self._given(node, name, value, part, of, self._known[key])
        bases = (self.names.resolve(base) for base in self.node.bases)
        found = (base.member(name, of) for base in bases if isinstance(base, ClassValue))
        return self._known[key] or next((value for value in found if value is not None), None)

    def _given(
        self, method: Any, name: str, value: ast.expr, part: int | None, of: ObjectValue, before: "Value"
    ) -> "Value":
        """Return the value assigned by a method to an attribute, with the functions of the value `before` merged."""
        within = self._within(method, of)
        at = of.place and of.place.part(name)
        if self.inside is not None:
            at = StepLocation(f"{parameters(method)[0]}.{name}", True, (*self.inside, self.node.name, method.name))
        found = within.assigned(name, at, value, part)
        is_called = any(text.endswith(f".{name}") for text in called_names(self.node))
        if found is None and is_called and not isinstance(value, ast.Constant):
            found = FunctionValue(name, at, [(within, [value])], node=value)
        if isinstance(found, FunctionValue) and at is None:
            found = replace(found, around=f"{self.node.name}()")
        if isinstance(found, FunctionValue) and isinstance(before, FunctionValue) and before not in found.wrapped:
            return replace(found, wrapped=[*found.wrapped, before])
        return found or before

    @property
    def members(self) -> list[str]:
        """Names of the methods, and of the attributes assigned by them."""
        given = (name for node in self._methods for name, _, _ in self_attributes(node))
        return list(dict.fromkeys((*(node.name for node in self._methods), *given)))

    @property
    def _methods(self) -> list[Any]:
        return [node for node in self.node.body if isinstance(node, DEFS)]

    def _within(self, method: Any, of: ObjectValue) -> "NameScope":
        inside = None if self.inside is None else (*self.inside, self.node.name)
        return self.names.within(method, inside, dict.fromkeys(parameters(method)[:1], of), self.node.name)


Value = FunctionValue | ObjectValue | ClassValue | None
