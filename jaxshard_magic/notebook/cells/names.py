"""Names bound, called and mentioned by code, from syntax trees and compiled functions."""

import ast
import functools
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...introspect import is_a, own_dict, static_attribute

DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*DEFS, ast.ClassDef)
_OWN_SCOPE = (*_DEFINITIONS, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MOST_LAYERS = 50  # objects that have every attribute, such as mocks, have layers without end


def in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and all nodes run with it, without the bodies of functions and classes."""
    yield node
    if not isinstance(node, _OWN_SCOPE):
        for child in ast.iter_child_nodes(node):
            yield from in_scope(child)


def bound_names(node: ast.AST) -> set[str]:
    """Return the names bound by a statement; attributes as `trainer.step`."""
    names: set[str] = set()
    for part in in_scope(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                names.add(name)
            case ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.Name() | ast.Attribute() if isinstance(part.ctx, ast.Store):
                names.add(ast.unparse(part))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                # A walrus inside a comprehension binds in the enclosing scope.
                names |= {each.target.id for each in ast.walk(part) if isinstance(each, ast.NamedExpr)}
    return names


def mentioned_names(*nodes: ast.AST) -> set[str]:
    """Return every name and attribute name inside the nodes."""
    parts = [part for node in nodes for part in ast.walk(node)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def variables(*nodes: ast.AST) -> set[str]:
    """Return every variable named in the nodes: read, bound, imported, defined, and parameters of functions."""
    names: set[str] = set()
    for part in (part for node in nodes for part in ast.walk(node)):
        match part:
            case ast.Name(id=name) | ast.arg(arg=name):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
    return names


def called_names(node: ast.AST) -> list[str]:
    """Return the callees inside `node`, bodies of functions included: `step`, `trainer.step`."""
    functions = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [ast.unparse(f) for f in functions if isinstance(f, (ast.Name, ast.Attribute))]


def nodes_outside_definitions(*nodes: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes and everything inside, without the bodies of functions and classes; lambdas and comprehensions
    included."""
    for node in nodes:
        yield node
        if not isinstance(node, _DEFINITIONS):
            yield from nodes_outside_definitions(*ast.iter_child_nodes(node))


def wrapper_layers(obj: Any) -> Iterator[Any]:
    """Yield the layers of a callable from outside: jit wrappers, partials, bound methods, the Python function."""
    for _ in range(_MOST_LAYERS):
        if obj is None:
            return
        yield obj
        if is_a(obj, types.FunctionType) and is_user_code(obj):
            return
        if is_a(obj, functools.partial):
            obj = obj.func
        else:
            found = static_attribute(obj, "__func__")
            obj = static_attribute(obj, "__wrapped__", _of_equinox(obj)) if found is None else found


def _of_equinox(obj: Any) -> Any:
    """Return the function inside a jit of Equinox; None for other objects."""
    return (
        # A property there, which a static lookup does not call.
        obj.__wrapped__ if type(obj).__module__ == "equinox._jit" and hasattr(obj, "donate_first") else None
    )


def plain_function(obj: Any) -> types.FunctionType | None:
    """Return the Python function inside jit wrappers, partials and bound methods; None without any."""
    if is_a(obj, type):
        return None
    return next((f for f in reversed([*wrapper_layers(obj)]) if is_a(f, types.FunctionType)), None)


def is_jitted(obj: Any) -> bool:
    """Return whether anything but partials and a bound method wraps the user's function."""
    return not all(
        is_a(each, (types.MethodType, functools.partial)) or (is_a(each, types.FunctionType) and is_user_code(each))
        for each in wrapper_layers(obj)
    )


def owner_of(obj: Any) -> Any:
    """Return the object of a bound method, wrapped or not; None without any."""
    return next((each.__self__ for each in wrapper_layers(obj) if is_a(each, types.MethodType)), None)


def is_user_code(defined: types.FunctionType | type) -> bool:
    """Return whether a function or class is the user's: from no installed package and not from the standard library."""
    names = defined.__globals__ if is_a(defined, types.FunctionType) else {}
    # The globals first: `functools.wraps` copies `__module__` from another function.
    module = names.get("__name__") or defined.__module__ or ""
    root = module.partition(".")[0]
    file = own_dict(sys.modules.get(root)).get("__file__") or ""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return root == "__main__" or not (root in sys.stdlib_module_names or installed)


def reachable_names(function: types.FunctionType, seen: set[types.FunctionType] | None = None) -> set[str]:
    """Return the names mentioned by `function` and by the user's functions reachable from it."""
    seen = set() if seen is None else seen
    seen.add(function)
    names = code_names(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    # Reading an empty cell, of a variable not bound yet, raises ValueError.
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    for value in values:
        inner = plain_function(value) if callable(value) else None
        if inner is not None:
            names = names | {inner.__name__}
            if inner not in seen and is_user_code(inner):
                names |= reachable_names(inner, seen)
    return names


def code_names(code: types.CodeType) -> set[str]:
    """Return the names mentioned by compiled code and nested functions, without local variables."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(code_names(inner) for inner in nested))


@dataclass(frozen=True)
class Imported:
    """Import binding: a module, or a name in a module.

    Attributes:
        module: Full name of the module.
        name: Name in the module; None for the module itself.
    """

    module: str
    name: str | None

    @property
    def loaded(self) -> bool:
        return self.module in sys.modules

    @property
    def value(self) -> Any:
        module = sys.modules[self.module]
        return module if self.name is None else getattr(module, self.name, None)


def parameters(node: Any) -> list[str]:
    """Return the names of a function's parameters; nothing for other nodes."""
    if not isinstance(node, (*DEFS, ast.Lambda)):
        return []
    of = node.args
    every = (*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg)
    return [argument.arg for argument in every if argument is not None]


def bindings(body: Sequence[ast.stmt]) -> dict[str, list[Any]]:
    """Return the names bound by statements, each with every value bound.

    A value is a definition, an import or `(expression, index)` with the index of the result, None for a single result.
    None stands for a value unknown from the syntax.
    """
    found: dict[str, list[Any]] = {}
    for statement in body:
        for part in in_scope(statement):
            for name, to in _bound_by(part):
                found.setdefault(name, []).append(to)
    return found


def _bound_by(node: ast.AST) -> Iterator[tuple[str, Any]]:
    if isinstance(node, _DEFINITIONS):
        yield node.name, node
    elif isinstance(node, ast.Import):
        for each in node.names:
            # `import a.b` binds `a`, `import a.b as c` binds the submodule.
            module = each.name if each.asname else each.name.partition(".")[0]
            yield each.asname or module, Imported(module, None)
    elif isinstance(node, ast.ImportFrom):
        for each in node.names:
            yield each.asname or each.name, Imported(node.module or "", each.name)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
        for target, value, at in _assignments(node):
            if isinstance(target, ast.Name):
                yield target.id, (value, at)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, None


def _assignments(node: Any) -> Iterator[tuple[Any, ast.expr, int | None]]:
    """Yield each assignment target with the value, and with the index of the result if there are several."""
    value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            for at, each in enumerate(target.elts):
                # `a, b = x, y` has a value for each target.
                paired = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                yield (each, value.elts[at], None) if paired else (each, value, at)
        else:
            yield target, value, None


def self_attributes(method: Any, name: str | None = None) -> Iterator[tuple[str, ast.expr, int | None]]:
    """Yield the attributes assigned to `self` by a method, each with the value and the index of the result.

    Args:
        method: `def` statement.
        name: Attribute to look for; None for all.
    """
    first = parameters(method)[:1]
    for node in ast.walk(method):
        if first and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target, value, at in _assignments(node):
                own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == first[0]
                if own and name in (None, target.attr):
                    yield target.attr, value, at
