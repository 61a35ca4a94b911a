"""The syntax of functions and classes that the notebook holds, where their text is known."""

import ast
import linecache
import types
from functools import lru_cache
from typing import Any

from .names import plain_function


def definition_of(function: types.FunctionType) -> Any:
    """The `def` or `lambda` of a function, as an ast node; None where its text is not known, or is another's by now."""
    code = function.__code__
    kinds = ast.Lambda if code.co_name == "<lambda>" else (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in _nodes(code.co_filename) if isinstance(node, kinds)]
    return next((node for node in found if _begins(node) == code.co_firstlineno and _named(node, code)), None)


def class_definition_of(cls: type) -> ast.ClassDef | None:
    """The `class` statement of a class, found by one of its methods."""
    for function in functions_of(cls):
        for node in _nodes(function.__code__.co_filename):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                last = node.end_lineno or node.lineno
                if node.lineno <= function.__code__.co_firstlineno <= last:
                    return node
    return None


def functions_of(cls: type) -> list[types.FunctionType]:
    """The functions that the text of a class defines for it."""
    found = (plain_function(value) for value in vars(cls).values() if callable(value))
    own = (f for f in found if f is not None and f.__qualname__ == f"{cls.__qualname__}.{f.__name__}")
    return list(own)


def _begins(node: Any) -> int:
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
    except SyntaxError:  # the file is another one by now
        return []
