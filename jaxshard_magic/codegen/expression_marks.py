"""Marks that name the value of each expression of the user's functions in a traced step."""

import ast
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from ..program.ir import Equation
from .cells import Cells, SourceSpan, span_of

MARK_FUNCTION = "jaxshard_seen"  # name of the function called with an expression's number and value
_MARK = "jaxshard:seen."
_CHANGED = (ast.Name, ast.Attribute, ast.Subscript)
_COMPUTE = (ast.BinOp, ast.Call, ast.Subscript)
_LEFT = (ast.FunctionDef, ast.AsyncFunctionDef, ast.JoinedStr, ast.MatchValue)  # left alone; `_tree` marks functions


@dataclass
class ExpressionMarks:
    """Expressions of the user's text, numbered, with the findings of a trace.

    Attributes:
        names: Whether names and attributes count as expressions.
        nodes: Node of each expression.
        spans: Span of each expression.
        table_spans: Span of the array read by a possible lookup, by number of the expression.
        ranks: Numbers of dimensions of the arrays returned by each expression.
        parents: Number of the smallest enclosing expression, by number of the expression.
    """

    names: bool = False
    nodes: list[ast.expr] = field(default_factory=list)
    spans: list[SourceSpan] = field(default_factory=list)
    table_spans: dict[int, SourceSpan] = field(default_factory=dict)
    ranks: dict[int, set[int]] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)

    def mark_value(self, k: int, x: Any) -> Any:
        """Return the value of expression `k`, named by `checkpoint_name` if it is a traced array of floats."""
        array = isinstance(x, Tracer) and isinstance(x, jax.Array)  # no references (jax.Ref)
        if not array or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        self.ranks.setdefault(k, set()).add(x.ndim)
        # A `name` equation stays in the jaxpr and computes nothing.
        return checkpoint_name(x, f"{_MARK}{k}")

    def marked_trees(self, cells: Cells) -> dict[str, tuple[ast.Module, ast.Module]]:
        """Return the original tree of each cell, and a tree with all expressions in the user's functions marked."""
        return {
            file: (tree, self._tree(ast.parse("".join(cells.source_lines[file])), file, cells.statement_lines[file]))
            for file, tree in cells.trees.items()
        }

    def _tree(self, tree: ast.Module, file: str, lines: set[int]) -> ast.Module:
        for node in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]:
            if node.lineno in lines:
                node.body = [_Marking(self, file).visit(s) for s in node.body]
        return tree


def expression_number(e: Equation) -> int | None:
    """Return the number of the expression named by an equation; None for other equations."""
    name = e.params["name"] if e.primitive.names_value else ""
    return int(name.removeprefix(_MARK)) if name.startswith(_MARK) else None


def _table(node: ast.AST) -> ast.expr | None:
    """Return the array that `table[ids]` or `jnp.take(table, ids)` reads, or None."""
    if isinstance(node, ast.Subscript):
        return _unmarked(node.value)
    if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute) and node.func.attr == "take":
        return _unmarked(node.args[0])
    return None


def _unmarked(node: ast.expr) -> ast.expr:
    """Return the expression inside of a mark, or the expression itself."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == MARK_FUNCTION:
        return node.args[1]
    return node


class _Marking(ast.NodeTransformer):
    """Transformer that wraps expressions in calls of the marking function."""

    def __init__(self, marks: ExpressionMarks, file: str):
        self.marks, self.file = marks, file
        self._kinds = (*_COMPUTE, ast.Name, ast.Attribute) if marks.names else _COMPUTE
        self._parts: list[list[int]] = [[]]  # stack: subexpressions of each expression being visited

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        # Annotations of local names are not evaluated, so only the value is marked.
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self._parts.append([])  # a lambda runs later: its expressions have no parent outside of it
        super().generic_visit(node)
        self._parts.pop()
        return node

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, _LEFT):
            return node
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) and isinstance(node, _CHANGED):
            return node  # the target of an assignment: the object itself changes, and a mark returns another one
        if not isinstance(node, self._kinds):
            return super().generic_visit(node)
        self._parts.append([])
        if not _is_chain(node):
            super().generic_visit(node)
        parts, k = self._parts.pop(), len(self.marks.spans)
        self._parts[-1].append(k)
        self.marks.parents.update(dict.fromkeys(parts, k))
        self.marks.nodes.append(node)
        self.marks.spans.append(span_of(node, self.file))
        if (looked_up := _table(node)) is not None:
            self.marks.table_spans[k] = span_of(looked_up, self.file)
        call = ast.Call(ast.Name(MARK_FUNCTION, ast.Load()), [ast.Constant(k), node], [])
        return ast.copy_location(call, node)


def _is_chain(node: ast.AST) -> bool:
    """Return whether a node is a name or an attribute of a name, such as `self.dense`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
