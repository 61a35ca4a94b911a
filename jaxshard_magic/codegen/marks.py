"""The user's expressions told apart in the traced step: each names the arrays that it gives."""

import ast
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from ..program.ir import Equation
from .cells import Cells, Place, place_of

SEEN = "jaxshard_seen"  # what an expression's value is given to, by its number
_MARK = "jaxshard:seen."
_CHANGED = (ast.Name, ast.Attribute, ast.Subscript)
_COMPUTE = (ast.BinOp, ast.Call, ast.Subscript)
_LEFT = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.JoinedStr,
    ast.MatchValue,
)  # inner functions have their own turn


@dataclass
class Marks:
    """`nodes[k]` is expression k, and `places[k]` where it stands; `ranks[k]`: of how many dimensions the arrays were
    that it gave; `tables[k]`: where that stands which it looks up in, for those that may be lookups. `within[k]`: the
    expression that k is the next part of. With `names`, names and attributes are expressions as well."""

    names: bool = False
    nodes: list[ast.expr] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    tables: dict[int, Place] = field(default_factory=dict)
    ranks: dict[int, set[int]] = field(default_factory=dict)
    within: dict[int, int] = field(default_factory=dict)

    def seen(self, k: int, x: Any) -> Any:
        """The value of expression k; of floats that are traced, by its name."""
        array = isinstance(x, Tracer) and isinstance(x, jax.Array)  # not a jax.Ref
        if not array or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        self.ranks.setdefault(k, set()).add(x.ndim)
        return checkpoint_name(x, f"{_MARK}{k}")

    def both(self, cells: Cells) -> dict[str, tuple[ast.Module, ast.Module]]:
        """The tree of each cell, and one with every expression marked that stands in a function of its pieces."""
        return {
            file: (tree, self._tree(ast.parse("".join(cells.files[file])), file, cells.lines[file]))
            for file, tree in cells.trees.items()
        }

    def _tree(self, tree: ast.Module, file: str, lines: set[int]) -> ast.Module:
        for node in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]:
            if node.lineno in lines:
                node.body = [_Marking(self, file).visit(s) for s in node.body]
        return tree


def expression_of(e: Equation) -> int | None:
    """The number of the expression whose value an equation names; None for other equations."""
    name = e.params["name"] if e.primitive.names_value else ""
    return int(name.removeprefix(_MARK)) if name.startswith(_MARK) else None


def _table(node: ast.AST) -> ast.expr | None:
    """What `table[ids]` or `jnp.take(table, ids)` looks up in."""
    if isinstance(node, ast.Subscript):
        return _unmarked(node.value)
    if (
        isinstance(node, ast.Call)
        and node.args
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "take"
    ):
        return _unmarked(node.args[0])
    return None


def _unmarked(node: ast.expr) -> ast.expr:
    """The expression itself, where it is marked."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == SEEN:
        return node.args[1]
    return node


class _Marking(ast.NodeTransformer):
    def __init__(self, marks: Marks, file: str):
        self.marks, self.file = marks, file
        self._kinds = (*_COMPUTE, ast.Name, ast.Attribute) if marks.names else _COMPUTE
        self._parts: list[list[int]] = [[]]  # of the expressions that are open, those next to them

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        self._parts.append([])  # what it computes is no part of where it stands
        super().generic_visit(node)
        self._parts.pop()
        return node

    def generic_visit(self, node: ast.AST) -> Any:
        if isinstance(node, _LEFT):
            return node
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)) and isinstance(node, _CHANGED):
            return node  # what is changed in place stays the very object
        if not isinstance(node, self._kinds):
            return super().generic_visit(node)
        self._parts.append([])
        if not _is_chain(node):
            super().generic_visit(node)
        parts, k = self._parts.pop(), len(self.marks.places)
        self._parts[-1].append(k)
        self.marks.within.update(dict.fromkeys(parts, k))
        self.marks.nodes.append(node)
        self.marks.places.append(place_of(node, self.file))
        if (looked_up := _table(node)) is not None:
            self.marks.tables[k] = place_of(looked_up, self.file)
        call = ast.Call(ast.Name(SEEN, ast.Load()), [ast.Constant(k), node], [])
        return ast.copy_location(call, node)


def _is_chain(node: ast.AST) -> bool:
    """A name, or an attribute of one: `self.dense`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)
