"""What code binds, calls and mentions by name, read from syntax trees and from compiled functions."""

import ast
import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_OWN_SCOPE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
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
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(part.name)
        elif isinstance(part, ast.alias):
            names.add(part.asname or part.name.partition(".")[0])
        elif isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Store):
            names.add(ast.unparse(part))
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


def updated(node: ast.AST) -> set[str]:
    """The functions called with something that their result replaces: `state, loss = f(state, batch)`."""
    names: set[str] = set()
    for part in ast.walk(node):
        if not (isinstance(part, ast.Assign) and isinstance(part.value, ast.Call)):
            continue
        call = part.value
        given = mentioned(*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(call.func, ast.Name) and given & mentioned(*part.targets):
            names.add(call.func.id)
    return names


def plain_function(obj: Any) -> types.FunctionType | None:
    """The Python function inside jit wrappers, partials and bound methods; None when there is none."""
    while obj is not None and not isinstance(obj, types.FunctionType):
        if isinstance(obj, type):
            return None
        if isinstance(obj, functools.partial):
            obj = obj.func
        else:
            obj = getattr(obj, "__func__", None) or getattr(obj, "__wrapped__", None)
    return obj


def written_here(function: types.FunctionType) -> bool:
    """Whether the function is the user's: not of an installed package or the standard library."""
    root = (function.__module__ or "").partition(".")[0]
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return root == "__main__" or not (root in sys.stdlib_module_names or installed)


def used_by(function: types.FunctionType, seen: set[types.FunctionType] | None = None) -> set[str]:
    """The names that `function` and the user's functions that it reaches mention."""
    seen = set() if seen is None else seen
    seen.add(function)
    names = _code_names(function.__code__)
    values = [function.__globals__.get(name) for name in names]
    values += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    for value in values:
        inner = plain_function(value) if callable(value) else None
        if inner is not None:
            names = names | {inner.__name__}
            if inner not in seen and written_here(inner):
                names |= used_by(inner, seen)
    return names


def _code_names(code: types.CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(_code_names(inner) for inner in nested))
