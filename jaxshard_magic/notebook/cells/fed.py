"""Has the loops of a cell whose batches the step takes get them ahead of time; the cell's code stays as it runs."""

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .constants import Constants, Unchanged
from .reach import Reach
from .values import Step

_AROUND = ("enumerate", "tqdm")  # they give what their first argument does

Feeds = Callable[[Any], Any]


class Fed(Unchanged):
    """Stands before what a loop iterates over, and gives what takes that ahead: of the same object the same one, so
    that an iterator goes on with what was taken. A range holds no batches."""

    def __init__(self, feeds: Feeds):
        self._feeds = feeds
        self._last: tuple[Any, Any] = None, None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, range):
            return value
        if value is not self._last[0] or value is None:
            self._last = value, self._feeds(value)
        return self._last[1]


def feed_loops(
    tree: ast.Module, step: Step, namespace: Mapping[str, Any], feeds: Feeds, constants: Constants
) -> int:
    """Have `feeds` take ahead what the innermost loops that call the step iterate over; how many loops there are."""
    reach, found = Reach(tree, step, namespace), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not reach.within(*node.body):
            continue
        if not any(reach.within(*inner.body) for inner in _inside(node)):
            _feed(node, Fed(feeds), constants)
            found += 1
    return found


def _inside(loop: ast.For) -> Iterator[ast.For | ast.While]:
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.For, ast.While)):
                yield node


def _feed(owner: Any, fed: Fed, constants: Constants) -> None:
    value = owner.iter if isinstance(owner, ast.For) else owner.args[0]
    if isinstance(value, ast.Call) and value.args and not isinstance(value.args[0], ast.Starred):
        name = value.func.id if isinstance(value.func, ast.Name) else getattr(value.func, "attr", "")
        if name in _AROUND:
            _feed(value, fed, constants)
            return
    through = constants.call(fed, value)
    if isinstance(owner, ast.For):
        owner.iter = through
    else:
        owner.args[0] = through
