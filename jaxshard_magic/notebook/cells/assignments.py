"""Names bound by statements, and attributes assigned to `self`."""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .names import in_scope

DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


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
    if isinstance(node, (*DEFS, ast.ClassDef)):
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
