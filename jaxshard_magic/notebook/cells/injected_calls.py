"""Calls inserted into a cell's code without binding a name.

The callables are constants of the compiled code, so functions that outlive their cell keep them.
"""

import ast
import types
from typing import Any


class PassThrough:
    """Identity function, and base of the inserted callables.

    Subclasses are pickled as the identity: code sent to another process loses the rest.
    """

    def __call__(self, value: Any) -> Any:
        return value

    def __reduce__(self) -> Any:
        return PassThrough, ()


class InjectedCalls:
    """Callables inserted into the code of one cell."""

    def __init__(self) -> None:
        self._callables: dict[str, PassThrough] = {}

    def call(self, callable: PassThrough, value: ast.expr) -> ast.Call:
        """Return the expression that calls `callable` with the value of an expression."""
        name = f"<jaxshard_magic: {len(self._callables)}>"
        self._callables[name] = callable
        # A tree holds only plain constants, so a text stands for the callable until the code is compiled.
        call = ast.Call(ast.Attribute(ast.Constant(name), "__call__", ast.Load()), [value], [])
        return ast.fix_missing_locations(ast.copy_location(call, value))

    def insert_callables(self, code: types.CodeType) -> types.CodeType:
        """Return compiled code with the callables in place of their placeholders."""
        return code.replace(co_consts=tuple(map(self._constant, code.co_consts)))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self.insert_callables(value)
        return self._callables.get(value, value) if isinstance(value, str) else value
