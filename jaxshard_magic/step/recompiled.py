"""What a call brought that its program was not compiled for, so that the loop waited for another compile."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..introspect import shown
from ..program.lines import users_frame
from ..program.roles import BATCH, OPTIMIZER, PARAMS
from ..program.trace import path_name
from .entry import Entry

MOST = 3  # changes that are told
ENTRIES, DTYPES, SHAPES = "entries", "dtypes", "shapes"  # in what a batch may be another than the one before


@dataclass(frozen=True)
class Recompiled:
    """Call number `call` of a step was compiled for anew, in `seconds`, where `line` of `file` made it.

    `changes` are the first of what it brought otherwise than the call before, in words; `more` so many besides.
    `batch`: in what the batch is another, of `ENTRIES`, `DTYPES` and `SHAPES`. `rows`: where the batch has fewer rows
    than before, and no other change, how many it had, and the position of the first array that had them among the
    leaves of the batch's arguments.
    """

    call: int
    seconds: float
    changes: tuple[str, ...]
    more: int
    batch: frozenset[str]
    rows: tuple[int, int] | None = None
    file: str | None = None
    line: int | None = None


def recompiled(before: Entry, now: Entry, call: int, read: Iterable[str] = ()) -> Recompiled:
    """Why `now` was compiled, after calls of `before`; by a call that is on this thread's stack. `read` are names of
    what the step reads beside its arguments, and that had changed."""
    old, new = _inputs(before), _inputs(now)
    changed = [path for path in old | new if _type(old.get(path)) != _type(new.get(path))]
    of_batch = [path for path in changed if _root(path) in _batch_arguments(before, now)]
    told = [_told(path, old.get(path), new.get(path)) for path in changed] or [*_values(before, now)]
    told += [f"{name}, which the step reads, is another value" for name in sorted(read)]
    told = told or ["a setting of JAX, or the objects that hold the arrays, changed"]
    _, at = users_frame(sys._getframe())
    file, line = at or (None, None)
    return Recompiled(
        call=call,
        seconds=now.trace_s + (now.compile_s or 0.0),
        changes=tuple(told[:MOST]),
        more=len(told[MOST:]),
        batch=frozenset(kind for path in of_batch for kind in _kinds(old.get(path), new.get(path))),
        rows=_rows(old, new, of_batch) if of_batch == changed else None,
        file=file,
        line=line,
    )


def _batch_arguments(before: Entry, now: Entry) -> set[str]:
    """The arguments that hold data: with all that is in them, also what the step has no use for."""
    leaves = [leaf for entry in (before, now) for leaf in entry.plan.leaves]
    state = {_root(leaf.path) for leaf in leaves if leaf.role in (PARAMS, OPTIMIZER)}
    return {_root(leaf.path) for leaf in leaves if leaf.role == BATCH} - state


def _root(path: str) -> str:
    return path.partition(".")[0]


def _kinds(old: Any, new: Any) -> Iterator[str]:
    """In what an input is another than before."""
    if old is None or new is None:
        yield ENTRIES
        return
    if old.dtype != new.dtype:
        yield DTYPES
    if old.shape != new.shape:
        yield SHAPES


def _rows(old: Mapping[str, Any], new: Mapping[str, Any], changed: Sequence[str]) -> tuple[int, int] | None:
    """The rows of the batch before, and which array had them, where all that changed is that there are fewer."""
    rows: set[int] = set()
    for path in changed:
        was, is_now = old.get(path), new.get(path)
        if was is None or is_now is None or {*_kinds(was, is_now)} != {SHAPES} or not was.shape:
            return None
        if was.shape[1:] != is_now.shape[1:] or was.ndim != is_now.ndim or is_now.shape[0] >= was.shape[0]:
            return None
        rows.add(was.shape[0])
    if len(rows) != 1:
        return None
    roots = {_root(path) for path in changed}
    inputs = [path for path in old if _root(path) in roots]
    return rows.pop(), inputs.index(changed[0])


def _inputs(entry: Entry) -> dict[str, Any]:
    """The arrays of a call as this host gave them: shapes and dtypes, by their paths."""
    call, given = entry.call_of, {}
    if call is None:
        return given
    for i, ((path, _, _), aval) in enumerate(zip(call.inputs, call.leaves, strict=True)):
        parts = {entry.rows[i]: entry.hosts} if i in entry.rows else {}
        shape = tuple(size // parts.get(d, 1) for d, size in enumerate(aval.shape))
        given[path_name(path)] = aval.update(shape=shape)
    return given


def _type(aval: Any) -> str | None:
    """`float32[32,784]`; None for None."""
    if aval is None:
        return None
    weak = ", as a Python number's" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}"


def _told(path: str, old: Any, new: Any) -> str:
    if old is None:
        return f"{path} is new, {_type(new)}"
    return f"{path} is gone" if new is None else f"{path} was {_type(old)}, now {_type(new)}"


def _values(before: Entry, now: Entry) -> Iterator[str]:
    """The Python values that changed: those that a step's program is made with."""
    a, b = before.call_of, now.call_of
    if a is None or b is None:
        return
    held: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = [(a.statics, b.statics), (a.held, b.held)]
    for old, new in held:
        for key in {**old, **new}:
            was, is_now = _short(old.get(key)), _short(new.get(key))
            if was != is_now:
                name = key if isinstance(key, str) else "a Python value"
                yield f"{name} was {was}, now {is_now}"


def _short(value: Any) -> str:
    text = shown(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
