"""What statements bind names to, and what they give objects."""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .names import in_scope

DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Imported:
    """What an import binds: a module, or what has a `name` in it."""

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
    """The names of a function's parameters; none of what is no function."""
    if not isinstance(node, (*DEFS, ast.Lambda)):
        return []
    of = node.args
    every = (*of.posonlyargs, *of.args, of.vararg, *of.kwonlyargs, of.kwarg)
    return [argument.arg for argument in every if argument is not None]


def bindings(body: Sequence[ast.stmt]) -> dict[str, list[Any]]:
    """The names that statements bind, each with what to: a definition, an import, or a value and which part of it;
    None for what can't be told."""
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
    """What is assigned to, and its value: of several results, which one."""
    value, targets = node.value, node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            for at, each in enumerate(target.elts):
                paired = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
                yield (each, value.elts[at], None) if paired else (each, value, at)
        else:
            yield target, value, None


def given_to_self(method: Any, name: str | None = None) -> Iterator[tuple[str, ast.expr, int | None]]:
    """The attributes that a method gives its object, each with its value: those of that name."""
    first = parameters(method)[:1]
    for node in ast.walk(method):
        if first and isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target, value, at in _assignments(node):
                own = isinstance(target, ast.Attribute) and ast.unparse(target.value) == first[0]
                if own and name in (None, target.attr):
                    yield target.attr, value, at
