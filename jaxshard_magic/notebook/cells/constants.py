"""What the code of a cell calls without having a name for it.

It lies among the constants of the compiled code, so that functions which outlive their cell keep it.
"""

import ast
import types
from typing import Any


class Unchanged:
    """Gives back what it is called with: what is left of the others where code is sent to another process."""

    def __call__(self, value: Any) -> Any:
        return value

    def __reduce__(self) -> Any:
        return Unchanged, ()


class Constants:
    """The callables of one cell's code."""

    def __init__(self) -> None:
        self._callables: dict[str, Unchanged] = {}

    def call(self, callable: Unchanged, value: ast.expr) -> ast.Call:
        """The expression that calls it with the value of another one."""
        name = f"<jaxshard_magic: {len(self._callables)}>"
        self._callables[name] = callable
        call = ast.Call(ast.Attribute(ast.Constant(name), "__call__", ast.Load()), [value], [])
        return ast.fix_missing_locations(ast.copy_location(call, value))

    def complete(self, code: types.CodeType) -> types.CodeType:
        """`code`, compiled from a tree with such calls, with the callables in the places of what stands for them."""
        return code.replace(co_consts=tuple(map(self._constant, code.co_consts)))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self.complete(value)
        return self._callables.get(value, value) if isinstance(value, str) else value
