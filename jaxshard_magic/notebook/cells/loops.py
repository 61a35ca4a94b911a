"""Has the loops of a cell that call the step say how long they are, and leaves the cell's code as it runs.

What a loop iterates over is passed through a callable that counts its passes, or gives it back unchanged.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .constants import Constants, Unchanged
from .lengths import Lengths, Loop, length
from .reach import Reach
from .values import Step

# The arguments whose lengths bound what these make; they have none of their own.
_BOUNDED_BY = {"enumerate": slice(1), "tqdm": slice(1), "zip": slice(None), "map": slice(1, None)}


class Part(Unchanged):
    """Stands before an argument that bounds a loop: an iterable, or the bound itself."""

    def __init__(self, read: Callable[[Any], int | None]):
        self.length: int | None = None
        self._read = read

    def __call__(self, value: Any) -> Any:
        self.length = self._read(value)
        return value


class Iterated(Unchanged):
    """Stands before what `loop` iterates over. The loop ends with the shortest of `parts`, its arguments."""

    def __init__(self, lengths: Lengths, loop: Loop):
        self._lengths, self._loop = lengths, loop
        self.parts: list[Part] = []

    def __call__(self, value: Any) -> Any:
        known = [*(part.length for part in self.parts), length(value)]
        passes = min((n for n in known if n is not None), default=None)
        return self._lengths.enter(self._loop, value, passes, sys._getframe(1))


def follow_loops(
    tree: ast.Module,
    filename: str,
    step: Step,
    namespace: Mapping[str, Any],
    lengths: Lengths,
    constants: Constants,
) -> None:
    """Put what tells `lengths` of loops into the cell's tree, for the calls of the step."""
    follower = _Follower(filename, Reach(tree, step, namespace), lengths, constants)
    for node in ast.walk(tree):
        follower.follow(node)


class _Follower:
    def __init__(self, filename: str, reach: Reach, lengths: Lengths, constants: Constants):
        self._filename, self._reach, self._lengths, self._constants = filename, reach, lengths, constants

    def follow(self, node: ast.AST) -> None:
        if isinstance(node, (ast.For, ast.While, ast.AsyncFor)):
            body = node.body
        elif isinstance(node, ast.DictComp):
            body = [node.key, node.value]
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            body = [node.elt]
        else:
            return
        if not self._reach.within(*body):
            return
        if isinstance(node, (ast.While, ast.AsyncFor)):
            self._lengths.endless.add(self._loop(node))
        else:
            for loop in [node] if isinstance(node, ast.For) else node.generators:
                loop.iter = self._iterated(loop.iter, self._loop(node))

    def _loop(self, node: Any) -> Loop:
        return Loop(self._filename, node.lineno, node.end_lineno or node.lineno)

    def _iterated(self, value: ast.expr, loop: Loop) -> ast.expr:
        through = Iterated(self._lengths, loop)
        self._open(value, through)
        return self._constants.call(through, value)

    def _open(self, value: ast.expr, through: Iterated) -> None:
        """Have the arguments of an `enumerate`, `zip`, ... tell their lengths, and those inside them."""
        if not isinstance(value, ast.Call):
            return
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Constant):
            self._open(value.args[0], through)  # of `Constants`, in which what is fed stands
            return
        name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        if name == "islice" and len(value.args) == 2:
            bounds, reads = range(2), (length, _bound)
        else:
            bounds, reads = range(len(value.args))[_BOUNDED_BY.get(name, slice(0))], None
        for at in bounds:
            argument = value.args[at]
            if isinstance(argument, ast.Starred):
                continue
            part = Part(reads[at] if reads else length)
            through.parts.append(part)
            self._open(argument, through)
            value.args[at] = self._constants.call(part, argument)


def _bound(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
