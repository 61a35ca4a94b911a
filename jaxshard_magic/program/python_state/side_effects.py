"""Check that a trace of a step without `jax.jit` leaves out no side effect that each plain call has."""

from collections.abc import Callable
from typing import TypeVar

from ...code_locations import location_text
from ...errors import ShardError, list_names
from ...temporary import UndoUnlessFinished
from .snapshot import PythonState, StateChange

_Traced = TypeVar("_Traced")
_TRACED_ONCE = "%%shard runs a step's Python once, when it is traced"


def trace_without_side_effects(trace: Callable[[], _Traced], state: PythonState | None, step: str) -> _Traced:
    """Return the result of `trace()` for a step without side effects that recur at each call.

    A change that a second trace does not make again, such as a table filled once, stays.

    Args:
        trace: Function that traces the step; called twice where the first trace changed values.
        state: Snapshot taken before; None for a step whose Python runs once in plain JAX as well.
        step: Name of the step, for messages.

    Raises:
        ShardError: The step takes from an iterator, draws from a random generator, keeps arrays of the trace, or
            changes a value of the notebook at each call. All values are restored first.
    """
    if state is None:
        return trace()
    for name, where in state.iterators.items():
        raise ShardError(
            f"{step} takes from the iterator {name} ({location_text(*where)}), and {_TRACED_ONCE}: every "
            "call would be given the "
            f"same. Take it outside, batch = next({name}), and pass that"
        )
    with UndoUnlessFinished(state.restore) as work:
        traced = trace()
        changes = state.changes()
        if changes and all(change.kind == "value" for change in changes):
            # A first trace may fill caches and tables; only a change that the second trace repeats would recur at each
            # call.
            second_snapshot = state.retake()
            traced = trace()
            changes = second_snapshot.changes()
        if changes:
            raise _side_effect_error(step, changes)
        work.mark_finished()
        return traced


def _side_effect_error(step: str, changes: list[StateChange]) -> ShardError:
    first = min(changes, key=lambda change: ("random", "array", "value").index(change.kind))
    same_kind = [change.name for change in changes if change.kind == first.kind]
    names, where = list_names(same_kind[:3]), location_text(*first.where)
    if first.kind == "random":
        return ShardError(
            f"{step} draws random numbers from {names} ({where}), and {_TRACED_ONCE}: every call would "
            "have the same ones. "
            "Draw them outside and pass them, or pass a key and use jax.random"
        )
    if first.kind == "array":
        return ShardError(
            f"{step} keeps an array in {names} ({where}), which a compiled step can't: return it from the step, and "
            "keep it outside"
        )
    return ShardError(
        f"{step} changes {names} each time that it is called ({where}), and {_TRACED_ONCE}: change it "
        "outside, or return "
        "what it is to be"
    )
