"""Which code of a cell calls the step, itself or through functions."""

import ast
import types
from collections.abc import Mapping
from typing import Any

from .names import called, plain_function, used_by, written_here
from .values import Step


class Reach:
    """The calls in a cell that come to the step, through functions of the cell and the notebook too."""

    def __init__(self, tree: ast.Module, step: Step, namespace: Mapping[str, Any]):
        owner, _, name = step.path.rpartition(".")
        self._steps = {step.path, f"self.{name}"} if owner else {step.path}
        if step.method or (step.inside and owner):  # on any object of the class
            self._steps |= {text for text in called(tree) if _last(text) == name}
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
