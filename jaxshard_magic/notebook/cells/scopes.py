"""The names that code sees: of a cell that has not run yet, and of the notebook and its functions."""

import ast
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ...introspect import is_a
from .assigned import DEFS, Imported, bindings, parameters
from .names import called, is_jitted, mentioned, owner_of, plain_function, written_here
from .texts import class_definition_of, definition_of, functions_of
from .values import DEFAULT, Class, Function, Object, Step, Value

JIT = {"jit", "pjit", "filter_jit", "pmap", "filter_pmap"}
GRADIENT = {"grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian"}
GRADIENT |= {"filter_grad", "filter_value_and_grad", "filter_vjp", "filter_jvp"}
# What makes a function of a function, and calls neither.
WRAPPERS = (
    JIT | GRADIENT | {"partial", "Partial", "cached_partial", "vmap", "filter_vmap", "checkpoint", "remat"}
)


class Names:
    """The names that a piece of code sees, and what they stand for."""

    around = ""

    def lookup(self, name: str) -> Value:
        raise NotImplementedError

    def held(self, value: Any, place: Step | None, of: Object | None = None) -> Value:
        """What an object of the notebook is; `of` is the one that it is a method of."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Value:
        """What an expression of names, attributes and made objects stands for."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            return owner.attribute(node.attr) if isinstance(owner, (Object, Class)) else None
        made = self.value(node.func) if isinstance(node, ast.Call) else None
        return Object(None, made) if isinstance(made, Class) else None

    def made(self, node: ast.expr) -> tuple[list[Function], bool]:
        """The functions that an expression gives, wrapped or not, and whether it gives them jitted."""
        if isinstance(node, ast.Lambda):
            return [self.defined(node, None, self.within(node, None))], False
        if isinstance(node, ast.IfExp):
            return self._all_made([node.body, node.orelse])
        if isinstance(node, ast.Call):
            maker = self.value(node.func)
            if isinstance(maker, Function):
                of = [function for result in maker.makes for function in result]
                return [*of, *(self._all_made(node.args)[0] if of else ())], any(f.jitted for f in of)
            if not (wrapping := _wrapper(node.func)):
                return [], False
            of, jitted = self._all_made([*node.args, *(keyword.value for keyword in node.keywords)])
            return of, jitted or bool(wrapping & JIT)
        value = self.value(node)
        return ([value], value.jitted) if isinstance(value, Function) else ([], False)

    def _all_made(self, nodes: Sequence[ast.expr]) -> tuple[list[Function], bool]:
        found = [self.made(node) for node in nodes]
        return [function for of, _ in found for function in of], any(jitted for _, jitted in found)

    def within(
        self,
        node: Any,
        inside: tuple[str, ...] | None,
        given: Mapping[str, Value] | None = None,
        around: str = "",
    ) -> "Text":
        """The names that the body of a function sees which is `inside` others, None for one that isn't the cell's."""
        inside = None if inside is None else (*inside, node.name)
        return Text(node, self, inside, given, around)

    def defined(self, node: Any, place: Step | None, within: "Names") -> Function:
        """The function of a `def` or `lambda`, whose body sees the names `within`."""
        if isinstance(node, ast.Lambda):
            return Function("<lambda>", place, [(within, [node.body])], node=node, around=self.around)
        jitted = bool(mentioned(*node.decorator_list) & JIT)
        parts = [(within, node.body), (self, node.decorator_list)]
        return Function(node.name, place, parts, jitted=jitted, node=node, around=self.around)

    def assigned(self, name: str, place: Step | None, value: ast.expr, at: int | None = None) -> Value:
        """What a name stands for that is given a value, or the part `at` of one."""
        if at is not None:
            maker = self.value(value.func) if isinstance(value, ast.Call) else None
            makes = maker.makes if isinstance(maker, Function) else []
            of = makes[at] if at < len(makes) else []
            jitted = any(function.jitted for function in of)
        else:
            of, jitted = self.made(value)
        if of or jitted:
            return Function(name, place, [(self, [value])], of, jitted, value, around=self.around)
        found = self.value(value)
        return replace(found, place=place) if isinstance(found, Object) else found


class Text(Names):
    """Those that the code of a module, a function or a lambda sees; `inside` as of a `Step`, None for the code of
    others. `given` are the parameters that are known."""

    def __init__(
        self,
        node: Any,
        outer: Names,
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

    def held(self, value: Any, place: Step | None, of: Object | None = None) -> Value:
        return self._outer.held(value, place, of)

    def lookup(self, name: str) -> Value:
        if name in self._given:
            return self._given[name]
        if name not in self._bound and name in self._declared:
            binds = self.lookup(self._declared[name])
            parts = binds.parts if isinstance(binds, Function) else ()
            return next((names.lookup(name) for names, _ in parts if isinstance(names, Text)), None)
        if name not in self._bound:
            return self._outer.lookup(name)
        if name not in self._known:
            self._known[name] = None  # while it is told, of a name that is bound to what it was
            value = self._bound_to(name)
            if name == DEFAULT and not isinstance(value, Function):  # whatever it is, it is said to be one
                value = Function(name, self._place(name), around=self.around)
            self._known[name] = value
        return self._known[name]

    def binds(self, name: str) -> bool:
        """Whether the code gives the name a value."""
        return name in self._bound or name in self._declared

    def give(self, parameter: str, value: Value) -> None:
        """Say what a parameter is, where that is not known."""
        if self._given.get(parameter) is None:
            self._given[parameter] = value

    def functions(self, depth: int | None = None) -> "Iterator[Function]":
        """Those that the code binds, also in `depth` functions inside each other, None for all; and of its classes."""
        for name in self._bound:
            value = self.lookup(name)
            found = [value] if isinstance(value, Function) else []
            if isinstance(value, Class) and value.names is self:
                found = [
                    member for each in value.members if isinstance(member := value.attribute(each), Function)
                ]
            for function in found:
                yield function
                for names, _ in function.parts if depth != 1 else ():
                    if isinstance(names, Text) and names._outer is self:
                        yield from names.functions(depth and depth - 1)

    @cached_property
    def _calls(self) -> set[str]:
        return set(called(self._node))

    def _place(self, name: str) -> Step | None:
        return None if self._inside is None else Step(name, True, self._inside)

    def _bound_to(self, name: str) -> Value:
        place = self._place(name)
        found = [self._of(name, place, node) for node in self._bound[name] if node is not None]
        functions = [value for value in found if isinstance(value, Function)]
        if (
            not functions or functions[-1] is not found[-1]
        ):  # `loss, grads = jax.value_and_grad(loss)(params)`
            return found[-1] if found else None
        parts = [part for function in functions for part in function.parts]
        of = [inner for function in functions for inner in function.of]
        return replace(functions[-1], parts=parts, of=of, jitted=any(f.jitted for f in functions))

    def _of(self, name: str, place: Step | None, node: Any) -> Value:
        if isinstance(node, ast.ClassDef):
            return Class(node, self, self._inside, place)
        if isinstance(node, DEFS):
            return self.defined(node, place, self.within(node, self._inside, around=self.around))
        if isinstance(node, Imported):
            found = self.held(node.value, place) if node.loaded else None
            return found or (Function(name, place, around=self.around) if name in self._calls else None)
        value, at = node
        found = self.assigned(name, place, value, at)
        if found is None and name in self._calls:
            return Function(name, place, [(self, [value])], node=value, around=self.around)
        return found


class Held(Names):
    """Those that the notebook holds, or those that one of its functions sees. `known` is what was told before. `cell`
    are those of the cell that is about to run, once they are known: a name that it binds is the cell's, for functions
    of earlier cells too. With `libraries` methods of the notebook's objects count as its own where a library has them:
    a trainer's."""

    def __init__(
        self,
        namespace: Mapping[str, Any],
        function: types.FunctionType | None = None,
        known: dict[tuple[int, Step | None], Value] | None = None,
    ):
        self._namespace, self._function = namespace, function
        self._known = {} if known is None else known
        self.cell: Text | None = None
        self.libraries = False
        self.around = "" if function is None else function.__qualname__.replace(".<locals>", "")

    def lookup(self, name: str) -> Value:
        function = self._function
        if function is None:
            return self.held(self._namespace.get(name), Step(name, False))
        if name in function.__code__.co_freevars:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            return None if cells[name] == types.CellType() else self.held(cells[name].cell_contents, None)
        here = function.__globals__ is self._namespace
        if here and self.cell is not None and self.cell.binds(name):
            return self.cell.lookup(name)
        home = None if here else function.__globals__
        return self.held(function.__globals__.get(name), Step(name, False, home=home))

    def held(self, value: Any, place: Step | None, of: Object | None = None) -> Value:
        key = id(value), place
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._told(value, place, of)
        return self._known[key]

    def _told(self, value: Any, place: Step | None, of: Object | None) -> Value:
        if value is None:
            return None
        if is_a(value, type):
            node = class_definition_of(value) if written_here(value) else None
            return node and Class(node, self._seen_by(*functions_of(value)), None, place)
        function = plain_function(value) if callable(value) else None
        if function is None:
            return Object(place, held=value, names=self)
        if not written_here(function) and not (self.libraries and _is_named(of)):
            return None
        names, node, owner = self._seen_by(function), definition_of(function), owner_of(value)
        of = of if owner is None else Object(None, held=owner, names=self)
        told = Function(
            function.__name__ if place is None else place.path.rpartition(".")[2],
            place,
            jitted=value is not function and is_jitted(value),
            node=node,
            known=(names, function, of),
            around=names.around.rpartition(".")[0] if place is None else "",
            method=of is not None,
        )
        if node is None:
            return told
        given = {} if of is None else dict.fromkeys(parameters(node)[:1], of)
        return replace(told, parts=self.defined(node, place, names.within(node, None, given)).parts)

    def _seen_by(self, *functions: types.FunctionType) -> "Held":
        if not functions:
            return self
        seen = Held(self._namespace, functions[0], self._known)
        seen.cell, seen.libraries = self.cell, self.libraries
        return seen


def _declared_global(module: Any) -> dict[str, str]:
    """Return the names that functions of a module bind as `global`, each with the function that does."""
    found: dict[str, str] = {}
    for function in (statement for statement in module.body if isinstance(statement, DEFS)):
        names = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        found |= dict.fromkeys(names & bindings(function.body).keys(), function.name)
    return found


def _is_named(of: Object | None) -> bool:
    """Return whether an object is one that a name of the notebook's holds itself."""
    return of is not None and of.place is not None and "." not in of.place.path


def _wrapper(node: ast.expr) -> set[str]:
    """The names of what wraps functions in `jax.jit`, `partial(jax.jit, static_argnums=0)`."""
    if not isinstance(node, ast.Call):
        return {ast.unparse(node).rpartition(".")[2]} & WRAPPERS
    first = _wrapper(node.func)
    if "partial" in first:
        return mentioned(node) & WRAPPERS
    return set() if node.args else first
