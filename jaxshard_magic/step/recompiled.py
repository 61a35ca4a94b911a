"""What a call brought that its program was not compiled for, so that the loop waited for another compile."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..program.lines import users_frame
from ..program.roles import BATCH
from ..program.trace import path_name
from .entry import Entry

MOST = 3  # changes that are told


@dataclass(frozen=True)
class Recompiled:
    """Call number `call` of a step was compiled for anew, in `seconds`, where `line` of `file` made it.

    `changes` are the first of what it brought otherwise than the call before, in words; `more` so many besides.
    `batch`: whether one of them is of the batch; `rows`: the first dimension that the batch had before, where it is
    that alone which changed, and became less.
    """

    call: int
    seconds: float
    changes: tuple[str, ...]
    more: int
    batch: bool
    rows: int | None = None
    file: str | None = None
    line: int | None = None


def recompiled(before: Entry, now: Entry, call: int) -> Recompiled:
    """Why `now` was compiled, after calls of `before`; by a call that is on this thread's stack."""
    old, new = _types(before), _types(now)
    batch = {leaf.path for leaf in now.plan.leaves if leaf.role == BATCH}
    changed = [path for path in old | new if old.get(path) != new.get(path)]
    told = [_told(path, old.get(path), new.get(path)) for path in changed] or [*_values(before, now)]
    told = told or ["a setting of JAX, or the objects that hold the arrays, changed"]
    _, at = users_frame(sys._getframe())
    file, line = at or (None, None)
    seconds = now.trace_s + (now.compile_s or 0.0)
    rows = _rows(before, now, changed) if batch.issuperset(changed) else None
    more = len(told[MOST:])
    return Recompiled(
        call, seconds, tuple(told[:MOST]), more, not batch.isdisjoint(changed), rows, file, line
    )


def _rows(before: Entry, now: Entry, changed: Sequence[str]) -> int | None:
    """The rows of the batch before, where all that changed of it is that there are fewer."""
    old, new = _inputs(before), _inputs(now)
    rows: set[int] = set()
    for path in changed:
        was, is_now = old.get(path), new.get(path)
        if was is None or is_now is None or not was.shape or was.dtype != is_now.dtype:
            return None
        if was.shape[1:] != is_now.shape[1:] or was.ndim != is_now.ndim or is_now.shape[0] >= was.shape[0]:
            return None
        rows.add(was.shape[0])
    return rows.pop() if len(rows) == 1 else None


def _inputs(entry: Entry) -> dict[str, Any]:
    """The inputs of a program, shapes and dtypes, by their paths."""
    n = len(entry.consts)
    pairs = zip(entry.traced.in_paths[n:], entry.traced.closed.in_avals[n:], strict=True)
    return {path_name(path): aval for path, aval in pairs}


def _types(entry: Entry) -> dict[str, str]:
    """The same, each as `float32[32,784]`."""
    return {path: _type(aval) for path, aval in _inputs(entry).items()}


def _type(aval: Any) -> str:
    weak = ", as a Python number's" if getattr(aval, "weak_type", False) else ""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]{weak}"


def _told(path: str, old: str | None, new: str | None) -> str:
    if old is None:
        return f"{path} is new, {new}"
    return f"{path} is gone" if new is None else f"{path} was {old}, now {new}"


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
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"
