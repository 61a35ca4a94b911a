"""A trace of a step that is not jitted, held against what a call of it would do each time."""

from collections.abc import Callable
from typing import TypeVar

from ...errors import ShardError, one_of
from ...places import place
from ...temporary import Unfinished
from .state import Change, PythonState

_Traced = TypeVar("_Traced")
_ONCE = "%%shard runs a step's Python once, when it is traced"


def traced_as_each_call(trace: Callable[[], _Traced], state: PythonState | None, step: str) -> _Traced:
    """Return what `trace()` gives, where the step's code does nothing beside it that each call would do again.

    What the code changed is looked at in `state`, taken before. A change that a second trace does not make again, such
    as a table that is filled once, stays. `state` is None for a step whose Python runs once in plain JAX, too.

    Raises ShardError, all as it was before, for a step that takes from an iterator, draws from a generator of random
    numbers, keeps arrays of the trace, or changes a value of the notebook's at each call.
    """
    if state is None:
        return trace()
    for name, where in state.iterators.items():
        raise ShardError(
            f"{step} takes from the iterator {name} ({place(*where)}), and {_ONCE}: every call would be given the "
            f"same. Take it outside, batch = next({name}), and pass that"
        )
    with Unfinished(state.undo) as work:
        traced = trace()
        changes = state.changes()
        if changes and all(change.kind == "value" for change in changes):
            after = state.now()
            traced = trace()
            changes = after.changes()
        if changes:
            raise _refused(step, changes)
        work.finished()
        return traced


def _refused(step: str, changes: list[Change]) -> ShardError:
    first = min(changes, key=lambda change: ("random", "array", "value").index(change.kind))
    alike = [change.name for change in changes if change.kind == first.kind]
    names, where = one_of(alike[:3]), place(*first.where)
    if first.kind == "random":
        return ShardError(
            f"{step} draws random numbers from {names} ({where}), and {_ONCE}: every call would have the same ones. "
            "Draw them outside and pass them, or pass a key and use jax.random"
        )
    if first.kind == "array":
        return ShardError(
            f"{step} keeps an array in {names} ({where}), which a compiled step can't: return it from the step, and "
            "keep it outside"
        )
    return ShardError(
        f"{step} changes {names} each time that it is called ({where}), and {_ONCE}: change it outside, or return "
        "what it is to be"
    )
