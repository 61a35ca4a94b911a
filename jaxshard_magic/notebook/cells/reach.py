"""Which code of a cell calls the step, itself or through functions, and how often."""

import ast
import types
from collections.abc import Mapping
from typing import Any

from .names import called, plain_function, used_by, written_here

_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


class Reach:
    """The calls in a cell that come to the step at `path`, through functions of the cell and the notebook too."""

    def __init__(self, tree: ast.Module, path: str, namespace: Mapping[str, Any]):
        owner, _, name = path.rpartition(".")
        self._steps = {path, f"self.{name}"} if owner else {path}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._bodies = {node.name: node.body for node in functions if node.name != name}
        self._inside: set[str] = set()  # functions of the cell, by name, methods too
        self._elsewhere = {
            text
            for text in dict.fromkeys(called(tree))
            if (function := _of_notebook(text, namespace)) and name in used_by(function)
        } - self._steps
        while more := {f for f in self._bodies.keys() - self._inside if self.within(*self._bodies[f])}:
            self._inside |= more

    def within(self, *nodes: ast.AST) -> bool:
        """Does a call in here, if it runs, come to the step?"""
        return any(
            text in self._steps or text in self._elsewhere or _last(text) in self._inside
            for node in nodes
            for text in called(node)
        )

    def steps(self, *nodes: ast.AST) -> int | None:
        """How often the step is called when these run once; None where the code alone doesn't tell."""
        return self._steps_in(nodes, frozenset())

    def _steps_in(self, nodes: Any, seen: frozenset[str]) -> int | None:
        total = 0
        for node in nodes:
            steps = self._steps_of(node, seen)
            if steps is None:
                return None
            total += steps
        return total

    def _steps_of(self, node: ast.AST, seen: frozenset[str]) -> int | None:
        if isinstance(node, _LATER) or not self.within(node):
            return 0
        if isinstance(node, _LOOPS):
            return None
        if isinstance(node, (ast.If, ast.IfExp)):
            either, other = (
                self._steps_in(branch if isinstance(branch, list) else [branch], seen)
                for branch in (node.body, node.orelse)
            )
            return either if either == other and not self.within(node.test) else None
        if isinstance(node, (ast.BoolOp, ast.Match)):
            return None
        own: int | None = 0
        if isinstance(node, ast.Call):
            own = self._steps_of_call(ast.unparse(node.func), seen)
        inner = self._steps_in(ast.iter_child_nodes(node), seen)
        return None if own is None or inner is None else own + inner

    def _steps_of_call(self, text: str, seen: frozenset[str]) -> int | None:
        name = _last(text)
        if text in self._steps:
            return 1
        if name in self._inside and name not in seen:
            return self._steps_in(self._bodies[name], seen | {name})
        return None if name in self._inside or text in self._elsewhere else 0


def _last(text: str) -> str:
    return text.rpartition(".")[2]


def _of_notebook(text: str, namespace: Mapping[str, Any]) -> types.FunctionType | None:
    """The user's own function or method that a call of `text` runs, as the notebook stands now."""
    root, *names = text.split(".")
    value = namespace.get(root)
    for name in names:
        value = getattr(type(value), name, None)
    function = plain_function(value) if callable(value) else None
    return function if function is not None and written_here(function) else None
