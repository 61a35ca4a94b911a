"""What code binds, calls and mentions by name, read from syntax trees and from compiled functions."""

import ast
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...introspect import is_a, own_dict, static_attribute

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOST_LAYERS = 50  # objects that answer to every name never end
_OWN_SCOPE = (*_DEFINITIONS, ast.Lambda)
_OWN_SCOPE += (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def in_scope(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what runs with it: not the bodies of functions and classes defined in it."""
    yield node
    if not isinstance(node, _OWN_SCOPE):
        for child in ast.iter_child_nodes(node):
            yield from in_scope(child)


def bound(node: ast.AST) -> set[str]:
    """The names that running the statement binds, attributes as `trainer.step`."""
    names: set[str] = set()
    for part in in_scope(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.alias(name=name, asname=other):
                names.add(other or name.partition(".")[0])
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                names.add(name)
            case ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.Name() | ast.Attribute() if isinstance(part.ctx, ast.Store):
                names.add(ast.unparse(part))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                names |= {each.target.id for each in ast.walk(part) if isinstance(each, ast.NamedExpr)}
    return names


def mentioned(*nodes: ast.AST) -> set[str]:
    """Every name and attribute name anywhere inside the nodes."""
    parts = [part for node in nodes for part in ast.walk(node)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def variables(*nodes: ast.AST) -> set[str]:
    """Every variable that the nodes name: what they read, bind, import and define, and their functions' parameters."""
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


def called(node: ast.AST) -> list[str]:
    """What is called anywhere inside `node`, functions' bodies included: `step` and `trainer.step`."""
    functions = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [ast.unparse(f) for f in functions if isinstance(f, (ast.Name, ast.Attribute))]


def own_code(*nodes: ast.AST) -> Iterator[ast.AST]:
    """The nodes and all inside that runs where they do, lambdas and comprehensions too: no bodies of functions and
    classes."""
    for node in nodes:
        yield node
        if not isinstance(node, _DEFINITIONS):
            yield from own_code(*ast.iter_child_nodes(node))


def layers(obj: Any) -> Iterator[Any]:
    """What a callable is made of, from outside: jit wrappers, partials, bound methods, the Python function."""
    for _ in range(_MOST_LAYERS):
        if obj is None:
            return
        yield obj
        if is_a(obj, types.FunctionType) and written_here(obj):
            return
        if is_a(obj, functools.partial):
            obj = obj.func
        else:
            found = static_attribute(obj, "__func__")
            obj = static_attribute(obj, "__wrapped__", _of_equinox(obj)) if found is None else found


def _of_equinox(obj: Any) -> Any:
    """The function under a jit of Equinox's, which tells it by a property; None for other objects."""
    return (
        obj.__wrapped__ if type(obj).__module__ == "equinox._jit" and hasattr(obj, "donate_first") else None
    )


def plain_function(obj: Any) -> types.FunctionType | None:
    """The Python function inside jit wrappers, partials and bound methods; None when there is none."""
    if is_a(obj, type):
        return None
    return next((f for f in reversed([*layers(obj)]) if is_a(f, types.FunctionType)), None)


def is_jitted(obj: Any) -> bool:
    """Whether there is more around the user's function than partials and a bound method."""
    return not all(
        is_a(each, (types.MethodType, functools.partial))
        or (is_a(each, types.FunctionType) and written_here(each))
        for each in layers(obj)
    )


def owner_of(obj: Any) -> Any:
    """The object that a bound method, wrapped or not, is called on."""
    return next((each.__self__ for each in layers(obj) if is_a(each, types.MethodType)), None)


def written_here(defined: types.FunctionType | type) -> bool:
    """Whether a function or class is the user's: not of an installed package or the standard library."""
    names = defined.__globals__ if is_a(defined, types.FunctionType) else {}
    module = names.get("__name__") or defined.__module__ or ""  # `functools.wraps` sets the other one
    root = module.partition(".")[0]
    file = own_dict(sys.modules.get(root)).get("__file__") or ""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return root == "__main__" or not (root in sys.stdlib_module_names or installed)


def used_by(function: types.FunctionType, seen: set[types.FunctionType] | None = None) -> set[str]:
    """The names that `function` and the user's functions that it reaches mention."""
    seen = set() if seen is None else seen
    seen.add(function)
    names = code_names(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    for value in values:
        inner = plain_function(value) if callable(value) else None
        if inner is not None:
            names = names | {inner.__name__}
            if inner not in seen and written_here(inner):
                names |= used_by(inner, seen)
    return names


def code_names(code: types.CodeType) -> set[str]:
    """The names that compiled code and the functions in it mention, but for their own."""
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(code_names(inner) for inner in nested))
