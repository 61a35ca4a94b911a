"""Last recorded call of a step, and traces of the step with other code in the user's functions. No cell runs again."""

import ast
import builtins
import gc
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..compilation.compiled_step import CompiledStep
from ..compilation.planned_call import PlannedCall
from ..errors import ShardError
from ..program.flatten_call import FlatCall
from ..temporary import ChangeGroup, Replaced, attribute, function_code

if TYPE_CHECKING:
    from ..step import ShardedStep


_Names = dict[str, list[types.CodeType]]  # code objects of a file by qualified name, in the order of the file


def last_call(step: "ShardedStep") -> tuple[CompiledStep, FlatCall]:
    """Return the compiled program of the step's last call, and the call with its arrays as shapes.

    Raises:
        ShardError: The step has neither run nor been compiled.
    """
    entry = step.entry
    if entry is None or entry.call_shapes is None:
        raise ShardError(f"{step.name} has neither run nor been compiled; call it, then write its code")
    return entry, entry.call_shapes


def plan_with_code(
    step: "ShardedStep", trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]
) -> PlannedCall:
    """Plan the last call again while the user's functions run other code.

    Args:
        step: A step with a recorded call.
        trees: Original and changed syntax tree of each cell.
        given: Further names for the changed code, with values.
    """
    with swap_code(trees, given):
        return step.programs.planned_for(last_call(step)[1])


def swap_code(trees: Mapping[str, tuple[ast.Module, ast.Module]], given: Mapping[str, Any]) -> ChangeGroup:
    """Return a context in which the functions of some files run other code.

    Args:
        trees: Original and changed syntax tree of each file. Both define the same functions in the same order.
        given: Further names for the changed code, with values. As builtins, every module sees them meanwhile.

    Raises:
        ValueError: A name is a builtin of Python.
    """
    if own := next((name for name in given if hasattr(builtins, name)), None):
        raise ValueError(f"{own} is a name of Python's own")
    names = [Replaced(attribute(builtins, name), value) for name, value in given.items()]
    functions = _functions_of(trees)
    # A changed `__code__` reaches every reference to a function, and no cell has to run again.
    running = [
        Replaced(function_code(function), code)
        for file, (tree, other) in trees.items()
        for function, code in _others(functions[file], _named(tree, file), _named(other, file))
    ]
    return ChangeGroup(*names, *running)


def _named(tree: ast.Module, file: str) -> _Names:
    """Return the code objects of a tree by qualified name."""
    codes: _Names = {}

    def add(code: types.CodeType) -> None:
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                codes.setdefault(inner.co_qualname, []).append(inner)
                add(inner)

    add(compile(ast.fix_missing_locations(tree), file, "exec"))
    return codes


def _functions_of(files: Collection[str]) -> dict[str, list[types.FunctionType]]:
    """Find the functions of some files in a single walk over all objects of the process. Cost: a second per ten million
    objects."""
    found: dict[str, list[types.FunctionType]] = {file: [] for file in files}
    # A function may be referenced from anywhere: no namespace has all of them.
    for f in gc.get_objects() if found else ():
        if type(f) is types.FunctionType and f.__code__.co_filename in found:
            found[f.__code__.co_filename].append(f)
    return found


def _others(
    functions: Iterable[types.FunctionType], was: _Names, now: _Names
) -> Iterator[tuple[types.FunctionType, types.CodeType]]:
    """Yield each function with its other code.

    Functions are left out where name and first line are ambiguous.
    """
    for function in functions:
        code = function.__code__
        same = was.get(code.co_qualname, [])
        places = [i for i, c in enumerate(same) if c.co_firstlineno == code.co_firstlineno]
        others = now.get(code.co_qualname, [])
        if len(places) == 1 and len(others) == len(same):
            other = others[places[0]]
            # Python refuses a code object with another number of free variables.
            if other.co_freevars == code.co_freevars:
                yield function, other
