"""Names of a cell before its run, and of the notebook: their scopes, and the functions, classes and objects that they
stand for."""

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ...introspect import is_a, own_dict
from .function_syntax import class_definition_of, definition_of, functions_of
from .names import (
    DEFS,
    Imported,
    bindings,
    called_names,
    is_jitted,
    is_user_code,
    mentioned_names,
    nodes_outside_definitions,
    owner_of,
    parameters,
    plain_function,
    self_attributes,
)

DEFAULT = "train_step"  # name of a step, unless the line gives another
JIT = {"jit", "pjit", "filter_jit", "pmap", "filter_pmap"}
GRADIENT = {"grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian"}
GRADIENT |= {"filter_grad", "filter_value_and_grad", "filter_vjp", "filter_jvp"}
# These make a function of a function, and call neither.
WRAPPERS = JIT | GRADIENT | {"partial", "Partial", "cached_partial", "vmap", "filter_vmap", "checkpoint", "remat"}


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
    compiled: "tuple[NameScope, types.FunctionType, _ObjectValue | None] | None" = None
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
class _ObjectValue:
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
        return self.member(name, _ObjectValue(None, self))

    def member(self, name: str, of: _ObjectValue) -> "Value":
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

    def _member(self, key: Any, name: str, of: _ObjectValue) -> "Value":
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
        self, method: Any, name: str, value: ast.expr, part: int | None, of: _ObjectValue, before: "Value"
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

    def _within(self, method: Any, of: _ObjectValue) -> "NameScope":
        inside = None if self.inside is None else (*self.inside, self.node.name)
        return self.names.within(method, inside, dict.fromkeys(parameters(method)[:1], of), self.node.name)


Value = FunctionValue | _ObjectValue | ClassValue | None


class NameScope:
    """Names visible to a piece of code, with their values.

    Attributes:
        around: Qualified name of the enclosing function of the notebook; empty for a cell's code.
    """

    around = ""

    def lookup(self, name: str) -> Value:
        """Return the value of a name; None if unknown."""
        raise NotImplementedError

    def resolve_object(self, value: Any, place: StepLocation | None, of: _ObjectValue | None = None) -> Value:
        """Return the description of an object of the notebook.

        Args:
            value: Object.
            place: Location to bind a step at; None without a name.
            of: Receiver, if the object is a method.
        """
        raise NotImplementedError

    def resolve(self, node: ast.expr) -> Value:
        """Return the value of an expression of names, attributes and constructed objects; None if unknown."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.resolve(node.value)
            return owner.attribute(node.attr) if isinstance(owner, (_ObjectValue, ClassValue)) else None
        made = self.resolve(node.func) if isinstance(node, ast.Call) else None
        return _ObjectValue(None, made) if isinstance(made, ClassValue) else None

    def functions_from(self, node: ast.expr) -> tuple[list[FunctionValue], bool]:
        """Return the functions that an expression evaluates to, wrapped or not, and whether they are jitted."""
        if isinstance(node, ast.Lambda):
            return [self.defined(node, None, self.within(node, None))], False
        if isinstance(node, ast.IfExp):
            return self._all_made([node.body, node.orelse])
        if isinstance(node, ast.Call):
            maker = self.resolve(node.func)
            if isinstance(maker, FunctionValue):
                of = [function for result in maker.makes for function in result]
                return [*of, *(self._all_made(node.args)[0] if of else ())], any(f.jitted for f in of)
            if not (wrapping := _wrapper(node.func)):
                return [], False
            of, jitted = self._all_made([*node.args, *(keyword.value for keyword in node.keywords)])
            return of, jitted or bool(wrapping & JIT)
        value = self.resolve(node)
        return ([value], value.jitted) if isinstance(value, FunctionValue) else ([], False)

    def _all_made(self, nodes: Sequence[ast.expr]) -> tuple[list[FunctionValue], bool]:
        found = [self.functions_from(node) for node in nodes]
        return [function for of, _ in found for function in of], any(jitted for _, jitted in found)

    def within(
        self, node: Any, inside: tuple[str, ...] | None, given: Mapping[str, Value] | None = None, around: str = ""
    ) -> "SourceScope":
        """Return the scope of a function's body.

        Args:
            node: `def` or `lambda`.
            inside: Names of the enclosing functions of the cell; None for code outside the cell.
            given: Known values of parameters.
            around: Qualified name of the enclosing class.
        """
        inside = None if inside is None else (*inside, node.name)
        return SourceScope(node, self, inside, given, around)

    def defined(self, node: Any, place: StepLocation | None, within: "NameScope") -> FunctionValue:
        """Return the function of a `def` or `lambda` whose body has the scope `within`."""
        if isinstance(node, ast.Lambda):
            return FunctionValue("<lambda>", place, [(within, [node.body])], node=node, around=self.around)
        jitted = bool(mentioned_names(*node.decorator_list) & JIT)
        parts = [(within, node.body), (self, node.decorator_list)]
        return FunctionValue(node.name, place, parts, jitted=jitted, node=node, around=self.around)

    def assigned(self, name: str, place: StepLocation | None, value: ast.expr, at: int | None = None) -> Value:
        """Return the value of a name after an assignment.

        Args:
            name: Name assigned to.
            place: Location to bind a step at.
            value: Assigned expression.
            at: Index of the result assigned to the name; None for a single result.
        """
        if at is not None:
            maker = self.resolve(value.func) if isinstance(value, ast.Call) else None
            makes = maker.makes if isinstance(maker, FunctionValue) else []
            of = makes[at] if at < len(makes) else []
            jitted = any(function.jitted for function in of)
        else:
            of, jitted = self.functions_from(value)
        if of or jitted:
            return FunctionValue(name, place, [(self, [value])], of, jitted, value, around=self.around)
        found = self.resolve(value)
        return replace(found, place=place) if isinstance(found, _ObjectValue) else found


class SourceScope(NameScope):
    """Scope of a module, a function or a lambda with known source.

    Args:
        node: Module, `def` or `lambda`.
        outer: Enclosing scope.
        inside: Names of the enclosing functions of the cell; None for code outside the cell.
        given: Known values of parameters.
        around: Qualified name of the enclosing class.
    """

    def __init__(
        self,
        node: Any,
        outer: NameScope,
        inside: tuple[str, ...] | None,
        given: Mapping[str, Value] | None = None,
        around: str = "",
    ):
        self._node, self._outer, self._inside = node, outer, inside
        self._given = {**dict.fromkeys(parameters(node)), **(given or {})}
        self._bound = {} if isinstance(node, ast.Lambda) else bindings(node.body)
        self._known: dict[str, Value] = {}
        self._declared = _declared_global(node) if inside == () else {}
        owner = ".".join(filter(None, (around, getattr(node, "name", ""))))
        self.around = owner if inside is None else ""

    def resolve_object(self, value: Any, place: StepLocation | None, of: _ObjectValue | None = None) -> Value:
        return self._outer.resolve_object(value, place, of)

    def lookup(self, name: str) -> Value:
        if name in self._given:
            return self._given[name]
        if name not in self._bound and name in self._declared:
            # Bound by a function with `global`: the value is the one in the scope of that function.
            binds = self.lookup(self._declared[name])
            parts = binds.parts if isinstance(binds, FunctionValue) else ()
            return next((names.lookup(name) for names, _ in parts if isinstance(names, SourceScope)), None)
        if name not in self._bound:
            return self._outer.lookup(name)
        if name not in self._known:
            self._known[name] = None  # until known: `step = jax.jit(step)` reads the name itself
            value = self._bound_to(name)
            # A `train_step` counts as a function, whatever its value.
            if name == DEFAULT and not isinstance(value, FunctionValue):
                value = FunctionValue(name, self._place(name), around=self.around)
            self._known[name] = value
        return self._known[name]

    def binds(self, name: str) -> bool:
        """Return whether the code binds a name."""
        return name in self._bound or name in self._declared

    def give(self, parameter: str, value: Value) -> None:
        """Set the value of a parameter if unknown."""
        if self._given.get(parameter) is None:
            self._given[parameter] = value

    def functions(self, depth: int | None = None) -> "Iterator[FunctionValue]":
        """Yield the functions bound by the code, methods of its classes included.

        Args:
            depth: Levels of nested functions to enter; None for all.
        """
        for name in self._bound:
            value = self.lookup(name)
            found = [value] if isinstance(value, FunctionValue) else []
            if isinstance(value, ClassValue) and value.names is self:
                found = [member for each in value.members if isinstance(member := value.attribute(each), FunctionValue)]
            for function in found:
                yield function
                for names, _ in function.parts if depth != 1 else ():
                    if isinstance(names, SourceScope) and names._outer is self:
                        yield from names.functions(depth and depth - 1)

    @cached_property
    def _calls(self) -> set[str]:
        return set(called_names(self._node))

    def _place(self, name: str) -> StepLocation | None:
        return None if self._inside is None else StepLocation(name, True, self._inside)

    def _bound_to(self, name: str) -> Value:
        """Return the value of a name from all its bindings; several functions become one with the code of all."""
        place = self._place(name)
        found = [self._of(name, place, node) for node in self._bound[name] if node is not None]
        functions = [value for value in found if isinstance(value, FunctionValue)]
        # A function's name may be reused for a value: `loss, grads = jax.value_and_grad(loss)(params)`.
        if not functions or functions[-1] is not found[-1]:
            return found[-1] if found else None
        parts = [part for function in functions for part in function.parts]
        of = [inner for function in functions for inner in function.wrapped]
        return replace(functions[-1], parts=parts, wrapped=of, jitted=any(f.jitted for f in functions))

    def _of(self, name: str, place: StepLocation | None, node: Any) -> Value:
        """Return the value of one binding of a name."""
        if isinstance(node, ast.ClassDef):
            return ClassValue(node, self, self._inside, place)
        if isinstance(node, DEFS):
            return self.defined(node, place, self.within(node, self._inside, around=self.around))
        if isinstance(node, Imported):
            found = self.resolve_object(node.value, place) if node.loaded else None
            return found or (FunctionValue(name, place, around=self.around) if name in self._calls else None)
        value, at = node
        found = self.assigned(name, place, value, at)
        if found is None and name in self._calls:
            return FunctionValue(name, place, [(self, [value])], node=value, around=self.around)
        return found


class NotebookScope(NameScope):
    """Scope of the notebook, or of one of its functions.

    Args:
        namespace: Variables of the notebook.
        function: Function with the scope; None for the notebook.
        known: Descriptions made so far, shared with other scopes.

    Attributes:
        cell: Scope of the cell about to run; names bound there belong to the cell for functions of earlier cells, too.
        libraries: Whether methods of the notebook's objects count as the user's if a library defines them, as a
            trainer's.
    """

    def __init__(
        self,
        namespace: Mapping[str, Any],
        function: types.FunctionType | None = None,
        known: dict[tuple[int, StepLocation | None], Value] | None = None,
    ):
        self._namespace, self._function = namespace, function
        self._known = {} if known is None else known
        self.cell: SourceScope | None = None
        self.libraries = False
        self.around = "" if function is None else function.__qualname__.replace(".<locals>", "")

    def lookup(self, name: str) -> Value:
        function = self._function
        if function is None:
            return self.resolve_object(self._namespace.get(name), StepLocation(name, False))
        if name in function.__code__.co_freevars:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            # The cell of a variable not bound yet is empty: reading it would raise ValueError.
            return None if cells[name] == types.CellType() else self.resolve_object(cells[name].cell_contents, None)
        here = function.__globals__ is self._namespace
        if here and self.cell is not None and self.cell.binds(name):
            return self.cell.lookup(name)
        home = None if here else function.__globals__
        return self.resolve_object(function.__globals__.get(name), StepLocation(name, False, home=home))

    def resolve_object(self, value: Any, place: StepLocation | None, of: _ObjectValue | None = None) -> Value:
        key = id(value), place
        if key not in self._known:
            self._known[key] = None
            # Objects may refer to each other; one under description counts as unknown.
            self._known[key] = self._told(value, place, of)
        return self._known[key]

    def _told(self, value: Any, place: StepLocation | None, of: _ObjectValue | None) -> Value:
        """Return the description of an object, class or function."""
        if value is None:
            return None
        if is_a(value, type):
            node = class_definition_of(value) if is_user_code(value) else None
            return node and ClassValue(node, self._seen_by(*functions_of(value)), None, place)
        function = plain_function(value) if callable(value) else None
        if function is None:
            return _ObjectValue(place, held=value, names=self)
        if not is_user_code(function) and not (self.libraries and _is_named(of)):
            return None
        names, node, owner = self._seen_by(function), definition_of(function), owner_of(value)
        of = of if owner is None else _ObjectValue(None, held=owner, names=self)
        told = FunctionValue(
            function.__name__ if place is None else place.path.rpartition(".")[2],
            place,
            jitted=value is not function and is_jitted(value),
            node=node,
            compiled=(names, function, of),
            around=names.around.rpartition(".")[0] if place is None else "",
            method=of is not None,
        )
        if node is None:
            return told
        given = {} if of is None else dict.fromkeys(parameters(node)[:1], of)
        return replace(told, parts=self.defined(node, place, names.within(node, None, given)).parts)

    def _seen_by(self, *functions: types.FunctionType) -> "NotebookScope":
        """Return the scope of the first function; this scope without any."""
        if not functions:
            return self
        seen = NotebookScope(self._namespace, functions[0], self._known)
        seen.cell, seen.libraries = self.cell, self.libraries
        return seen


def _declared_global(module: Any) -> dict[str, str]:
    """Return the names that functions of a module bind as `global`, each with the function that does."""
    found: dict[str, str] = {}
    for function in (statement for statement in module.body if isinstance(statement, DEFS)):
        names = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        found |= dict.fromkeys(names & bindings(function.body).keys(), function.name)
    return found


def _is_named(of: _ObjectValue | None) -> bool:
    """Return whether an object has a name of its own in the notebook."""
    return of is not None and of.place is not None and "." not in of.place.path


def _wrapper(node: ast.expr) -> set[str]:
    """Return the names of the function wrappers in `jax.jit` or `partial(jax.jit, static_argnums=0)`."""
    if not isinstance(node, ast.Call):
        return {ast.unparse(node).rpartition(".")[2]} & WRAPPERS
    first = _wrapper(node.func)
    if "partial" in first:
        return mentioned_names(node) & WRAPPERS
    return set() if node.args else first
