"""Syntax of the notebook's functions and classes, if their source is known."""

import ast
import linecache
import types
from functools import lru_cache
from typing import Any

from .names import plain_function


def definition_of(function: types.FunctionType) -> Any:
    """Return the `def` or `lambda` node of a function; None if the source is unknown or has changed."""
    code = function.__code__
    kinds = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in _nodes(code.co_filename) if isinstance(node, kinds)]
    return next((node for node in found if _begins(node) == code.co_firstlineno and _named(node, code)), None)


def class_definition_of(cls: type) -> ast.ClassDef | None:
    """Return the `class` statement of a class, found by the line of a method; None if unknown."""
    for function in functions_of(cls):
        for node in _nodes(function.__code__.co_filename):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                last = node.end_lineno or node.lineno
                if node.lineno <= function.__code__.co_firstlineno <= last:
                    return node
    return None


def functions_of(cls: type) -> list[types.FunctionType]:
    """Return the functions defined in a class's own source."""
    found = (plain_function(value) for value in vars(cls).values() if callable(value))
    # A class may also hold functions defined elsewhere.
    own = (f for f in found if f is not None and f.__qualname__ == f"{cls.__qualname__}.{f.__name__}")
    return list(own)


def _begins(node: Any) -> int:
    # `co_firstlineno` is the line of the first decorator.
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _named(node: Any, code: types.CodeType) -> bool:
    return isinstance(node, ast.Lambda) or node.name == code.co_name


def _nodes(file: str) -> list[ast.AST]:
    return _parsed(file, "".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _parsed(file: str, text: str) -> list[ast.AST]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    try:
        return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    except SyntaxError:  # the file has changed since
        return []
