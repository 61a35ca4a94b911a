"""Describe the changes in a call that made a loop wait for another compile."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..introspect import safe_repr
from ..program.roles import BATCH, OPTIMIZER, PARAMS
from ..program.source_lines import innermost_user_location
from ..program.trace import path_name
from .compiled_step import CompiledStep

MAX_CHANGES = 3  # changes in a message
ENTRIES, DTYPES, SHAPES = "entries", "dtypes", "shapes"  # kinds of changes of a batch


@dataclass(frozen=True)
class Recompilation:
    """A compile in the middle of a loop.

    Attributes:
        call: Number of the call.
        seconds: Seconds spent on tracing and compiling.
        changes: Changes from the previous call, in words; the first `MAX_CHANGES`.
        omitted: Number of further changes.
        batch_changes: Changes of the batch, of `ENTRIES`, `DTYPES` and `SHAPES`.
        full_batch: If the only change is a batch with fewer rows, the previous number of rows, and the position of the
            first changed array among the leaves of the batch's arguments; else None.
        file: File of the user's line that made the call.
        line: Number of the line.
    """

    call: int
    seconds: float
    changes: tuple[str, ...]
    omitted: int
    batch_changes: frozenset[str]
    full_batch: tuple[int, int] | None = None
    file: str | None = None
    line: int | None = None


def describe_recompilation(
    before: CompiledStep, now: CompiledStep, call: int, read: Iterable[str] = ()
) -> Recompilation:
    """Return the reasons for compiling `now` after calls of `before`.

    The calling line comes from this thread's stack, so use it inside the call.

    Args:
        before: Program of the previous call.
        now: Program of this call.
        call: Number of this call.
        read: Names of changed values that the step reads besides its arguments.
    """
    old, new = _local_inputs(before), _local_inputs(now)
    changed = [path for path in old | new if _type(old.get(path)) != _type(new.get(path))]
    of_batch = [path for path in changed if _root(path) in _batch_arguments(before, now)]
    descriptions = [_describe_change(path, old.get(path), new.get(path)) for path in changed] or [
        *_static_changes(before, now)
    ]
    descriptions += [f"{name}, which the step reads, is another value" for name in sorted(read)]
    descriptions = descriptions or ["a setting of JAX, or the objects that hold the arrays, changed"]
    _, at = innermost_user_location(sys._getframe())
    file, line = at or (None, None)
    return Recompilation(
        call=call,
        seconds=now.trace_s + (now.compile_s or 0.0),
        changes=tuple(descriptions[:MAX_CHANGES]),
        omitted=len(descriptions[MAX_CHANGES:]),
        batch_changes=frozenset(kind for path in of_batch for kind in _change_kinds(old.get(path), new.get(path))),
        full_batch=_full_batch(old, new, of_batch) if of_batch == changed else None,
        file=file,
        line=line,
    )


def _batch_arguments(before: CompiledStep, now: CompiledStep) -> set[str]:
    """Return the names of arguments with batch data; all their leaves count, also leaves not used by the step."""
    leaves = [leaf for entry in (before, now) for leaf in entry.plan.leaves]
    state = {_root(leaf.path) for leaf in leaves if leaf.role in (PARAMS, OPTIMIZER)}
    return {_root(leaf.path) for leaf in leaves if leaf.role == BATCH} - state


def _root(path: str) -> str:
    """Return the name of the argument at the root of a path."""
    return path.partition(".")[0]


def _change_kinds(old: Any, new: Any) -> Iterator[str]:
    """Yield the kinds of change of a batch input."""
    if old is None or new is None:
        yield ENTRIES
        return
    if old.dtype != new.dtype:
        yield DTYPES
    if old.shape != new.shape:
        yield SHAPES


def _full_batch(old: Mapping[str, Any], new: Mapping[str, Any], changed: Sequence[str]) -> tuple[int, int] | None:
    """Return the previous number of rows and the position of the first array, if the only change is fewer rows; else
    None."""
    rows: set[int] = set()
    for path in changed:
        old_aval, new_aval = old.get(path), new.get(path)
        if (
            old_aval is None
            or new_aval is None
            or {*_change_kinds(old_aval, new_aval)} != {SHAPES}
            or not old_aval.shape
        ):
            return None
        if (
            old_aval.shape[1:] != new_aval.shape[1:]
            or old_aval.ndim != new_aval.ndim
            or new_aval.shape[0] >= old_aval.shape[0]
        ):
            return None
        rows.add(old_aval.shape[0])
    if len(rows) != 1:
        return None
    roots = {_root(path) for path in changed}
    inputs = [path for path in old if _root(path) in roots]
    return rows.pop(), inputs.index(changed[0])


def _local_inputs(entry: CompiledStep) -> dict[str, Any]:
    """Return the shapes and dtypes of a call's arrays on this host, by path."""
    call, avals = entry.call_shapes, {}
    if call is None:
        return avals
    for i, ((path, _, _), aval) in enumerate(zip(call.inputs, call.leaves, strict=True)):
        # `call_shapes` has the global batch, and the user's code on this host sees its own rows.
        parts = {entry.per_host_dims[i]: entry.hosts} if i in entry.per_host_dims else {}
        shape = tuple(size // parts.get(d, 1) for d, size in enumerate(aval.shape))
        avals[path_name(path)] = aval.update(shape=shape)
    return avals


def _type(aval: Any) -> str | None:
    """Return a text such as `float32[32,784]`; None for None."""
    if aval is None:
        return None
    weak = ", as a Python number's" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}"


def _describe_change(path: str, old: Any, new: Any) -> str:
    """Return the change of one input in words."""
    if old is None:
        return f"{path} is new, {_type(new)}"
    return f"{path} is gone" if new is None else f"{path} was {_type(old)}, now {_type(new)}"


def _static_changes(before: CompiledStep, now: CompiledStep) -> Iterator[str]:
    """Yield the changes of static Python values in words."""
    a, b = before.call_shapes, now.call_shapes
    if a is None or b is None:
        return
    pairs: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = [
        (a.statics, b.statics),
        (a.python_values, b.python_values),
    ]
    for old, new in pairs:
        for key in {**old, **new}:
            was, is_now = _short_text(old.get(key)), _short_text(new.get(key))
            if was != is_now:
                name = key if isinstance(key, str) else "a Python value"
                yield f"{name} was {was}, now {is_now}"


def _short_text(value: Any) -> str:
    """Return a text for a value, cut to 40 characters."""
    text = safe_repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
