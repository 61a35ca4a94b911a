"""Which function of a cell is the train step."""

import ast
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ShardError, did_you_mean
from .names import bound, called, in_scope, mentioned, plain_function, updated, used_by, written_here

DEFAULT = "train_step"
_JIT = {"jit", "pjit", "filter_jit"}
_LOOPS = {"scan", "fori_loop", "while_loop"}
_GRADIENT = {"grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "hessian"}
_GRADIENT |= {"filter_grad", "filter_value_and_grad", "filter_vjp", "filter_jvp"}
_UPDATE = {"update", "apply_updates", "apply_gradients"}


@dataclass(frozen=True)
class Step:
    """Where the train step lives: `path` is its name or `trainer.step`; `here` when the cell binds it."""

    path: str
    here: bool

    @property
    def root(self) -> str:
        return self.path.partition(".")[0]


def find_step(tree: ast.Module, namespace: Mapping[str, Any], name: str | None = None) -> Step:
    """The train step of the cell: `name`, else `train_step` where the cell has or reaches it, else the
    function that most looks like one (it takes gradients, updates, is jitted, replaces its argument).

    Raises ShardError when there is none, or when two look alike.
    """
    cell = _Cell(tree, namespace)
    if name is not None:
        return cell.named(name)
    if cell.mentions(DEFAULT):
        whole = cell.tracing(DEFAULT)
        path = whole[0] if len(whole) == 1 else DEFAULT
        return Step(path, here=path in cell.bound)
    best = cell.best()
    if not best:
        raise ShardError(f"this cell defines and calls no function that may be the train step; {cell.hint()}")
    if len(best) > 1:
        raise ShardError(
            f"this cell has {len(best)} functions that may be the train step: {', '.join(best)}; "
            f"say which: --step {best[0]}"
        )
    return Step(best[0], here=best[0] in cell.bound)


class _Cell:
    """A cell's functions, by name, with all that each mentions; from the tree or from the notebook."""

    def __init__(self, tree: ast.Module, namespace: Mapping[str, Any]):
        self.tree, self.namespace = tree, namespace
        self.bound, self.called, self.updated = bound(tree), called(tree), updated(tree)
        self.uses: dict[str, set[str]] = {}
        self.jitted: set[str] = set()
        self.factories: set[str] = set()
        self.loops: dict[str, set[str]] = {}
        for node in in_scope(tree):
            if isinstance(node, ast.FunctionDef):
                self._add(node.name, mentioned(*node.body), mentioned(*node.decorator_list))
                self.loops[node.name] = _called_in_loops(node)
                if _returns_function(node):
                    self.factories.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._add_assigned(node.targets[0].id, node.value)
        for name in dict.fromkeys(self.called):
            self._add_from_notebook(name)

    def _add(self, name: str, uses: set[str], wrappers: set[str]) -> None:
        self.uses[name] = self.uses.get(name, set()) | uses
        if wrappers & _JIT:
            self.jitted.add(name)

    def _add_assigned(self, name: str, value: ast.expr) -> None:
        makers = mentioned(value.func) if isinstance(value, ast.Call) else set()
        if name in self.called and isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            self.factories.add(value.func.id)
        if name in self.called or isinstance(value, ast.Lambda) or makers & _JIT:
            self._add(name, mentioned(value), makers)

    def _add_from_notebook(self, name: str) -> None:
        value = self.namespace.get(name)
        function = plain_function(value) if name not in self.bound and callable(value) else None
        if function is not None and written_here(function):
            wrapped = not isinstance(value, types.FunctionType)
            self._add(name, used_by(function), _JIT if wrapped else set())

    def reach(self, name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        uses, seen = self.uses.get(name, set()), seen | {name}
        return uses.union(*(self.reach(inner, seen) for inner in uses - seen if inner in self.uses))

    def mentions(self, name: str) -> bool:
        reached = mentioned(self.tree).union(*self.uses.values())
        return name in self.bound or (name in reached and callable(self.namespace.get(name)))

    def tracing(self, name: str) -> list[str]:
        """The functions that the cell calls and that run `name` inside a jit or a scan of their own, where
        nothing else calls it: an epoch in one scan is the step, and not what it scans over.
        """
        outer = [f for f in self.uses if f in self.called and f != name and name in self.reach(f)]
        outer = [f for f in outer if f in self.jitted or self.reach(f) & _LOOPS]
        inside = set(outer).union(*(self.reach(f) for f in outer))
        rest = [node for node in self.tree.body if getattr(node, "name", None) not in inside]
        if any(name in called(node) for node in rest):
            return []
        return [f for f in outer if not any(f in self.reach(other) for other in outer if other != f)]

    def named(self, path: str) -> Step:
        root, dot, _ = path.partition(".")
        here = root in self.bound or path in self.bound
        if not here and root not in self.namespace:
            what = "object" if dot else "function"
            near = did_you_mean(root, (*self.uses, *self.bound, *self.namespace))
            raise ShardError(f"--step {path}: no {what} {root!r} in this cell or the notebook.{near}")
        return Step(path, here)

    def best(self) -> list[str]:
        """The candidates that score highest; of those, the ones that call no other of them."""
        names = [name for name in self.uses if name not in self.factories]
        names = [name for name in names if not self._is_training_loop(name)] or names
        scores = {name: self._score(name) for name in names}
        scores = {name: score for name, score in scores.items() if score or self._is_function(name)}
        top = [name for name, score in scores.items() if score == max(scores.values())]
        inner = [name for name in top if not self.reach(name) & (set(top) - {name})]
        return inner or top

    def _is_function(self, name: str) -> bool:
        defined = {node.name for node in in_scope(self.tree) if isinstance(node, ast.FunctionDef)}
        return name in defined or name not in self.bound

    def _score(self, name: str) -> int:
        return 4 * self._differentiates(name) + 2 * (
            self._updates(name) + (name in self.jitted) + (name in self.updated)
        )

    def _differentiates(self, name: str) -> bool:
        return bool((self.reach(name) - self.uses.keys()) & _GRADIENT)

    def _updates(self, name: str) -> bool:
        return bool((self.reach(name) - self.uses.keys()) & _UPDATE)

    def _is_training_loop(self, name: str) -> bool:
        steps = self.loops.get(name, set()) & self.uses.keys()
        return any(self._differentiates(step) and self._updates(step) for step in steps)

    def hint(self) -> str:
        methods = [path for path in self.called if "." in path and self._is_method(path)]
        return f"name it: --step {methods[0] if methods else 'NAME'}"

    def _is_method(self, path: str) -> bool:
        value = self.namespace.get(path.partition(".")[0])
        for part in path.split(".")[1:]:
            value = getattr(type(value), part, None)
        return isinstance(value, types.FunctionType) and written_here(value)


def _called_in_loops(node: ast.FunctionDef) -> set[str]:
    loops = [part for part in ast.walk(node) if isinstance(part, (ast.For, ast.While))]
    return {name for loop in loops for name in called(loop)}


def _returns_function(node: ast.FunctionDef) -> bool:
    """Whether the function makes functions: it returns one defined inside, as it is or jitted."""
    inside = [part for statement in node.body for part in in_scope(statement)]
    made = {part.name for part in inside if isinstance(part, ast.FunctionDef)}
    for part in inside:
        value = part.value if isinstance(part, ast.Return) else None
        for result in value.elts if isinstance(value, ast.Tuple) else [value]:
            if isinstance(result, ast.Call) and mentioned(result.func) & _JIT:
                result = result.args[0] if result.args else None
            if isinstance(result, ast.Lambda) or (isinstance(result, ast.Name) and result.id in made):
                return True
    return False
