"""Has the loops of a cell that call the step say how long they are, and leaves the cell's code as it runs.

What a loop iterates over is passed through a callable that counts its passes, or gives it back unchanged. Code has no
name for it: it lies among the constants of the compiled code, so that functions which outlive their cell keep it.
"""

import ast
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .lengths import Lengths, Loop, length
from .reach import Reach

# The arguments whose lengths bound what these make; they have none of their own.
_BOUNDED_BY = {"enumerate": slice(1), "tqdm": slice(1), "zip": slice(None), "map": slice(1, None)}


class Unchanged:
    """Gives back what it is called with: what is left of the others where code is sent to another process."""

    def __call__(self, value: Any) -> Any:
        return value

    def __reduce__(self) -> Any:
        return Unchanged, ()


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
    tree: ast.Module, filename: str, path: str, namespace: Mapping[str, Any], lengths: Lengths
) -> Callable[[types.CodeType], types.CodeType]:
    """Put what tells `lengths` of loops into the cell's tree, for the calls of the step at `path`.

    Returns what the code compiled from the tree must pass through before it runs.
    """
    follower = _Follower(filename, Reach(tree, path, namespace), lengths)
    for node in ast.walk(tree):
        follower.follow(node)
    return follower.complete


class _Follower:
    def __init__(self, filename: str, reach: Reach, lengths: Lengths):
        self._filename, self._reach, self._lengths = filename, reach, lengths
        self._callables: dict[str, Unchanged] = {}

    def complete(self, code: types.CodeType) -> types.CodeType:
        """`code` with the callables in the places of the constants that stand for them."""
        return code.replace(co_consts=tuple(map(self._constant, code.co_consts)))

    def _constant(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self.complete(value)
        return self._callables.get(value, value) if isinstance(value, str) else value

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
        return self._passed(value, through)

    def _open(self, value: ast.expr, through: Iterated) -> None:
        """Have the arguments of an `enumerate`, `zip`, ... tell their lengths, and those inside them."""
        if not isinstance(value, ast.Call):
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
            value.args[at] = self._passed(argument, part)

    def _passed(self, value: ast.expr, through: Unchanged) -> ast.expr:
        name = f"<jaxshard_magic: loop {len(self._callables)}>"
        self._callables[name] = through
        call = ast.Call(ast.Attribute(ast.Constant(name), "__call__", ast.Load()), [value], [])
        return ast.fix_missing_locations(ast.copy_location(call, value))


def _bound(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None
