"""The user's functions with other code while a step is traced: nothing of their cells is run again."""

import ast
import builtins
import gc
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

Names = dict[
    str, list[types.CodeType]
]  # the code of a file's functions by their qualified names, in its order


@contextmanager
def swapped(trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]) -> Iterator[None]:
    """Functions whose text is of one of these files run meanwhile what the second of its trees says. Both define the
    same functions in the same order, the first as they are; the second may name what is `given`."""
    with ExitStack() as stack:
        for name, value in given.items():
            stack.enter_context(_builtin(name, value))
        functions = _functions_of(trees)
        for file, (tree, other) in trees.items():
            for function, code in _others(functions[file], _named(tree, file), _named(other, file)):
                stack.enter_context(_running(function, code))
        yield


def _named(tree: ast.Module, file: str) -> Names:
    codes: Names = {}

    def add(code: types.CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                codes.setdefault(inner.co_qualname, []).append(inner)
                add(inner)

    add(compile(ast.fix_missing_locations(tree), file, "exec"))
    return codes


def _functions_of(files: Collection[str]) -> dict[str, list[types.FunctionType]]:
    """The functions that there are of each of these files, in one walk over all objects."""
    found: dict[str, list[types.FunctionType]] = {file: [] for file in files}
    for f in gc.get_objects():
        if type(f) is types.FunctionType and f.__code__.co_filename in found:
            found[f.__code__.co_filename].append(f)
    return found


def _others(
    functions: Iterable[types.FunctionType], was: Names, now: Names
) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """Each of a file's functions, with what it is to run."""
    for function in functions:
        code = function.__code__
        same = was.get(code.co_qualname, [])
        places = [i for i, c in enumerate(same) if c.co_firstlineno == code.co_firstlineno]
        others = now.get(code.co_qualname, [])
        if len(places) == 1 and len(others) == len(same):
            other = others[places[0]]
            if other.co_freevars == code.co_freevars:
                yield function, other


@contextmanager
def _running(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


@contextmanager
def _builtin(name: str, value: Any) -> Iterator[None]:
    """Every module knows the name meanwhile."""
    if hasattr(builtins, name):
        raise ValueError(f"{name} is a name of Python's own")
    setattr(builtins, name, value)
    try:
        yield
    finally:
        delattr(builtins, name)
