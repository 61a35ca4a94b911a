"""What a regular expression may mean in a loss: functions and modules that it calls, scopes, named values."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from ..program.ir import Equation, Program, Scope
from ..program.lines import is_ours, is_users

Frame = tuple[Any, int]  # the code of a function, and how far in it

_OWN = "jaxshard:"  # names that this package gives values
_COMPARED = 200  # characters of an expression that are compared with names
MOST_NAMES = 8  # told to who asked for one that is not there


def jit_labels(program: Program) -> dict[int, str]:
    """The names of functions under `jax.jit`, by the index of the equation, as scopes for what is inside."""
    names = {e.index: e.params.get("name") for e in program.equations if e.doors}
    return {index: name for index, name in names.items() if isinstance(name, str) and name.isidentifier()}


class Names:
    """The names in a program without jits, whose names are scopes (see `jit_labels`).

    Calls: the user's functions, and modules of whoever, that are called between the loss itself and an operation.
    Scopes: those of `jax.named_scope` and Linen's modules. Values: those of `checkpoint_name`. What the user's own
    remat holds, or a function with derivative rules of its own, is left alone and has none.
    """

    def __init__(self, program: Program):
        self.scopes = list(_open_scopes(program.top))
        equations = [e for scope in self.scopes for e in scope.equations]
        self._frames = {e.index: frames(e) for e in equations}
        self._shared = _shared([found for found in self._frames.values() if found])
        self.values = {e.index: e.params["name"] for e in equations if e.primitive.names_value}
        self.values = {k: name for k, name in self.values.items() if not name.startswith(_OWN)}

    def spans(self, scope: Scope, pattern: re.Pattern) -> list[tuple[int, int]]:
        """The equations of each call or scope that matches, as ranges; one after the other is one each."""
        keys = [self._key(e, pattern) for e in scope.equations]
        found, start = [], 0
        for k in range(1, len(keys) + 1):
            if k == len(keys) or keys[k] != keys[start]:
                if keys[start] is not None:
                    found += self._calls(scope, start, k)
                start = k
        return found

    def nearest(self, pattern: str) -> list[str]:
        """Names that there are, those most like `pattern` first."""
        scopes = (part for scope in self.scopes for e in scope.equations for part in _path(e).split("/"))
        calls = (n for found in self._frames.values() for n in map(_name, found[self._shared :]) if n)
        names = dict.fromkeys([*self.values.values(), *calls, *scopes])
        shown = [n for n in names if n.replace(".", "").isidentifier() and not n.startswith("_")]
        given = pattern[:_COMPARED].lower()
        return sorted(shown, key=lambda n: -SequenceMatcher(None, given, n.lower()).ratio())[:MOST_NAMES]

    def callers(self, e: Equation, pattern: re.Pattern) -> tuple[Frame, ...] | None:
        """The calls that led to the outermost one that matches, outermost first; None where none does."""
        found = self._frames[e.index]
        for k in range(self._shared, len(found)):
            name = _name(found[k])
            if name and pattern.search(name):
                return found[:k]
        return None

    def _key(self, e: Equation, pattern: re.Pattern) -> tuple | None:
        """What tells the outermost call or scope that matches from others; None where nothing does."""
        callers = self.callers(e, pattern)
        if callers is not None:
            return (*callers, self._frames[e.index][len(callers)][0])
        path = _path(e)
        parts = path.split("/")
        for k, part in enumerate(parts):
            if part and pattern.search(part):
                return tuple(parts[: k + 1])
        match = pattern.search(path) if path else None
        return tuple(path[: match.end()].split("/")) if match else None

    def _calls(self, scope: Scope, start: int, stop: int) -> list[tuple[int, int]]:
        """A range, cut where the same call is made again and again (layers in a Python loop)."""
        lines = [(e.name, *self._frames[e.index]) for e in scope.equations[start:stop]]
        count = lines.count(lines[0])
        length = len(lines) // count
        if count == 1 or lines != lines[:length] * count:
            return [(start, stop)]
        return [(a, a + length) for a in range(start, stop, length)]


def _open_scopes(scope: Scope) -> Iterator[Scope]:
    yield scope
    for e in scope.equations:
        if not (e.primitive.remat or e.primitive.custom):
            for door in e.doors:
                yield from _open_scopes(door.scope)


def frames(e: Equation) -> tuple[Frame, ...]:
    """The calls that led to an equation, outermost first."""
    found = e.eqn.source_info.traceback
    return tuple(zip(*found.raw_frames(), strict=True))[::-1] if found else ()


def _shared(chains: Sequence[tuple[Frame, ...]]) -> int:
    """How many of the outermost functions are the same for all: the step, and the loss itself."""
    depth = 0
    for level in zip(*chains, strict=False):
        if len({code for code, _ in level}) > 1:
            break
        depth += 1
    return depth


def _name(frame: Frame) -> str | None:
    """What a reader calls a function: that of a module is the module's. None of what is not the user's."""
    file, name = frame[0].co_filename, frame[0].co_qualname.rpartition("<locals>.")[2]
    module = name.endswith(".__call__") and not is_ours(file) and "/jax/" not in file.replace("\\", "/")
    if name.startswith("<") or not (module or is_users(file)):
        return None
    return name.removesuffix(".__call__")


def _path(e: Equation) -> str:
    return str(e.eqn.source_info.name_stack)
