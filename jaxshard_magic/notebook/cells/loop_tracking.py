"""Track the loops of a cell that call the step, without changing the code's behavior.

A loop's iterable passes through a callable that returns a counting iterator, or the iterable unchanged.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .injected_calls import InjectedCalls, PassThrough
from .loop_lengths import CellLoop, LoopLengths, known_length
from .resolved_values import StepLocation
from .step_calls import StepCalls

# These iterators have no length; the lengths of these arguments bound them.
_BOUNDED_BY = {"enumerate": slice(1), "tqdm": slice(1), "zip": slice(None), "map": slice(1, None)}


class LengthProbe(PassThrough):
    """Injected call around an argument that bounds a loop; records its length.

    Args:
        read: Returns the bound from the argument: the length of an iterable, or the number itself.
    """

    def __init__(self, read: Callable[[Any], int | None]):
        self.length: int | None = None
        self._read = read

    def __call__(self, value: Any) -> Any:
        self.length = self._read(value)
        return value


class TrackedIterable(PassThrough):
    """Injected call around a loop's iterable.

    Args:
        lengths: Receives the loop.
        loop: Loop in the code.

    Attributes:
        parts: Probes of the arguments; the loop ends with the shortest.
    """

    def __init__(self, lengths: LoopLengths, loop: CellLoop):
        self._lengths, self._loop = lengths, loop
        self.parts: list[LengthProbe] = []

    def __call__(self, value: Any) -> Any:
        known = [*(part.length for part in self.parts), known_length(value)]
        passes = min((n for n in known if n is not None), default=None)
        return self._lengths.enter_loop(self._loop, value, passes, sys._getframe(1))


def track_loops(
    tree: ast.Module,
    filename: str,
    step: StepLocation,
    namespace: Mapping[str, Any],
    lengths: LoopLengths,
    constants: InjectedCalls,
) -> None:
    """Insert calls into a cell's tree that report loops around calls of the step.

    Args:
        tree: Tree of the cell; changed in place.
        filename: File of the cell.
        step: Location of the step.
        namespace: Variables of the notebook.
        lengths: Receives the loops.
        constants: Receives the inserted callables.
    """
    follower = _Follower(filename, StepCalls(tree, step, namespace), lengths, constants)
    for node in ast.walk(tree):
        follower.follow(node)


class _Follower:
    """Visitor that inserts tracking into one loop at a time."""

    def __init__(self, filename: str, reach: StepCalls, lengths: LoopLengths, constants: InjectedCalls):
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
        if not self._reach.has_call_in(*body):
            return
        if isinstance(node, (ast.While, ast.AsyncFor)):
            self._lengths.endless.add(self._loop(node))
        else:
            for loop in [node] if isinstance(node, ast.For) else node.generators:
                loop.iter = self._iterated(loop.iter, self._loop(node))

    def _loop(self, node: Any) -> CellLoop:
        return CellLoop(self._filename, node.lineno, node.end_lineno or node.lineno)

    def _iterated(self, value: ast.expr, loop: CellLoop) -> ast.expr:
        through = TrackedIterable(self._lengths, loop)
        self._open(value, through)
        return self._constants.call(through, value)

    def _open(self, value: ast.expr, through: TrackedIterable) -> None:
        """Insert probes around the arguments of `enumerate`, `zip` and the like, recursively."""
        if not isinstance(value, ast.Call):
            return
        if isinstance(value.func, ast.Attribute) and isinstance(value.func.value, ast.Constant):
            self._open(value.args[0], through)  # call injected by `feed_loops` around the iterable
            return
        name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        # `islice(x, n)` ends with `x` or after `n` items.
        if name == "islice" and len(value.args) == 2:
            bounds, reads = range(2), (known_length, _bound)
        else:
            bounds, reads = range(len(value.args))[_BOUNDED_BY.get(name, slice(0))], None
        for at in bounds:
            argument = value.args[at]
            if isinstance(argument, ast.Starred):
                continue
            part = LengthProbe(reads[at] if reads else known_length)
            through.parts.append(part)
            self._open(argument, through)
            value.args[at] = self._constants.call(part, argument)


def _bound(value: Any) -> int | None:
    """Return the stop of an `islice`; None for other values."""
    return value if isinstance(value, int) and value >= 0 else None
