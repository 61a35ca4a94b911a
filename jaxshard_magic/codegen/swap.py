"""The user's functions with other code while a step is traced: nothing of their cells is run again."""

import ast
import builtins
import gc
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..temporary import Joined, Replaced, attribute, code_of

Names = dict[
    str, list[types.CodeType]
]  # the code of a file's functions by their qualified names, in its order


def swapped(trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]) -> Joined:
    """Functions whose text is of one of these files run meanwhile what the second of its trees says. Both define the
    same functions in the same order, the first as they are; the second may name what is `given`: every module knows it
    meanwhile."""
    if own := next((name for name in given if hasattr(builtins, name)), None):
        raise ValueError(f"{own} is a name of Python's own")
    names = [Replaced(attribute(builtins, name), value) for name, value in given.items()]
    functions = _functions_of(trees)
    running = [
        Replaced(code_of(function), code)
        for file, (tree, other) in trees.items()
        for function, code in _others(functions[file], _named(tree, file), _named(other, file))
    ]
    return Joined(*names, *running)


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
    """Find the functions of each of these files in one walk over all objects: a second for ten million of them."""
    found: dict[str, list[types.FunctionType]] = {file: [] for file in files}
    for f in gc.get_objects() if found else ():
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
