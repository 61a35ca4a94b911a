"""Prefetch batches for the loops of a cell that call the step, without changing the loops' code."""

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .injected_calls import InjectedCalls, PassThrough
from .resolved_values import StepLocation
from .step_calls import StepCalls

_AROUND = ("enumerate", "tqdm")  # these iterate over their first argument

Feeds = Callable[[Any], Any]


class FedIterable(PassThrough):
    """Injected call around a loop's iterable; returns a prefetching iterable.

    A range passes unchanged: it holds no batches.

    Args:
        feeds: Makes the prefetching iterable.
    """

    def __init__(self, feeds: Feeds):
        self._feeds = feeds
        self._last: tuple[Any, Any] = None, None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, range):
            return value
        # An iterator passed a second time has to continue with the items already prefetched.
        if value is not self._last[0] or value is None:
            self._last = value, self._feeds(value)
        return self._last[1]


def feed_loops(
    tree: ast.Module, step: StepLocation, namespace: Mapping[str, Any], feeds: Feeds, constants: InjectedCalls
) -> int:
    """Prefetch the iterables of the innermost loops that call the step.

    Args:
        tree: Tree of the cell; changed in place.
        step: Location of the step.
        namespace: Variables of the notebook.
        feeds: Makes a prefetching iterable.
        constants: Receives the inserted callables.

    Returns:
        Number of such loops.
    """
    reach, found = StepCalls(tree, step, namespace), 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not reach.has_call_in(*node.body):
            continue
        if not any(reach.has_call_in(*inner.body) for inner in _inside(node)):
            _feed(node, FedIterable(feeds), constants)
            found += 1
    return found


def _inside(loop: ast.For) -> Iterator[ast.For | ast.While]:
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, (ast.For, ast.While)):
                yield node


def _feed(owner: Any, fed: FedIterable, constants: InjectedCalls) -> None:
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
