"""Code of a cell that calls the step, directly or through functions."""

import ast
import types
from collections.abc import Mapping
from typing import Any

from .names import called_names, is_user_code, plain_function, reachable_names
from .resolved_values import StepLocation


class StepCalls:
    """Calls in a cell that lead to the step, through functions of the cell and the notebook, too.

    Args:
        tree: Tree of the cell.
        step: Location of the step.
        namespace: Variables of the notebook.
    """

    def __init__(self, tree: ast.Module, step: StepLocation, namespace: Mapping[str, Any]):
        owner, _, name = step.path.rpartition(".")
        self._steps = {step.path, f"self.{name}"} if owner else {step.path}
        if step.method or (step.inside and owner):  # called on an object of any name
            self._steps |= {text for text in called_names(tree) if _last(text) == name}
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self._bodies = {node.name: node.body for node in functions if node.name != name}
        self._inside: set[str] = set()  # names of functions and methods of the cell that call the step
        self._elsewhere = {
            text
            for text in dict.fromkeys(called_names(tree))
            if (function := _of_notebook(text, namespace)) and name in reachable_names(function)
        } - self._steps
        # To a fixpoint: a function calls the step if it calls a function that does.
        while more := {f for f in self._bodies.keys() - self._inside if self.has_call_in(*self._bodies[f])}:
            self._inside |= more

    def has_call_in(self, *nodes: ast.AST) -> bool:
        """Return whether a call in `nodes`, if run, leads to the step."""
        return any(
            text in self._steps or text in self._elsewhere or _last(text) in self._inside
            for node in nodes
            for text in called_names(node)
        )


def _last(text: str) -> str:
    return text.rpartition(".")[2]


def _of_notebook(text: str, namespace: Mapping[str, Any]) -> types.FunctionType | None:
    """Return the user's function or method that a call of `text` runs at present; None for other callables."""
    root, *names = text.split(".")
    value = namespace.get(root)
    for name in names:
        value = getattr(type(value), name, None)
    function = plain_function(value) if callable(value) else None
    return function if function is not None and is_user_code(function) else None
