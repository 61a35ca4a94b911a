"""Names that a regular expression can match in a loss: called functions and modules, scopes, named values."""

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from ..program.ir import Equation, Program, SubJaxpr
from ..program.source_lines import is_package_file, is_user_file

Frame = tuple[Any, int]  # (code object, index of the instruction)

_OWN = "jaxshard:"  # prefix of names that this package gives to values
_COMPARED = 200  # characters of an expression; `SequenceMatcher` takes quadratic time
MOST_NAMES = 8  # names listed in the error about an expression without a match


def jit_labels(program: Program) -> dict[int, str]:
    """Return the names of functions under `jax.jit` by equation index, to be used as scopes of what they contain."""
    names = {e.index: e.params.get("name") for e in program.equations if e.bodies}
    return {index: name for index, name in names.items() if isinstance(name, str) and name.isidentifier()}


class ProgramNames:
    """Names in a program without jits; names of jits are scopes (see `jit_labels`).

    Three kinds of names match:
    - calls: the user's functions, and modules of any library, called between the loss itself and an operation;
    - scopes: those of `jax.named_scope` and of Linen's modules;
    - values: those of `checkpoint_name`.

    Equations inside of remat by the user, or of a function with a custom derivative rule, have no names.
    """

    def __init__(self, program: Program):
        self.scopes = list(_open_scopes(program.top))
        equations = [e for scope in self.scopes for e in scope.equations]
        self._frames = {e.index: call_stack(e) for e in equations}
        self._shared = _shared([found for found in self._frames.values() if found])
        self.values = {e.index: e.params["name"] for e in equations if e.primitive.names_value}
        self.values = {k: name for k, name in self.values.items() if not name.startswith(_OWN)}

    def spans(self, scope: SubJaxpr, pattern: re.Pattern) -> list[tuple[int, int]]:
        """Return the ranges of equations of each call or scope that matches; consecutive calls have a range each."""
        keys = [self._key(e, pattern) for e in scope.equations]
        found, start = [], 0
        for k in range(1, len(keys) + 1):
            if k == len(keys) or keys[k] != keys[start]:
                if keys[start] is not None:
                    found += self._calls(scope, start, k)
                start = k
        return found

    def nearest(self, pattern: str) -> list[str]:
        """Return up to `MOST_NAMES` existing names, the most similar to `pattern` first."""
        scopes = (part for scope in self.scopes for e in scope.equations for part in _path(e).split("/"))
        calls = (n for found in self._frames.values() for n in map(_name, found[self._shared :]) if n)
        names = dict.fromkeys([*self.values.values(), *calls, *scopes])
        shown = [n for n in names if n.replace(".", "").isidentifier() and not n.startswith("_")]
        given = pattern[:_COMPARED].lower()
        return sorted(shown, key=lambda n: -SequenceMatcher(None, given, n.lower()).ratio())[:MOST_NAMES]

    def callers(self, e: Equation, pattern: re.Pattern) -> tuple[Frame, ...] | None:
        """Return the calls that led to the outermost matching call, outermost first; None where no call matches."""
        found = self._frames[e.index]
        for k in range(self._shared, len(found)):
            name = _name(found[k])
            if name and pattern.search(name):
                return found[:k]
        return None

    def _key(self, e: Equation, pattern: re.Pattern) -> tuple | None:
        """Return an identity of the outermost call or scope that matches; None where none does."""
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

    def _calls(self, scope: SubJaxpr, start: int, stop: int) -> list[tuple[int, int]]:
        """Split a range where the same call is repeated, as by layers in a Python loop."""
        lines = [(e.name, *self._frames[e.index]) for e in scope.equations[start:stop]]
        count = lines.count(lines[0])
        length = len(lines) // count
        if count == 1 or lines != lines[:length] * count:
            return [(start, stop)]
        return [(a, a + length) for a in range(start, stop, length)]


def _open_scopes(scope: SubJaxpr) -> Iterator[SubJaxpr]:
    yield scope
    for e in scope.equations:
        # Remat by the user stays as it is, and a custom derivative rule replaces the gradient of its body.
        if not (e.primitive.remat or e.primitive.custom_derivative):
            for body in e.bodies:
                yield from _open_scopes(body.sub_jaxpr)


def call_stack(e: Equation) -> tuple[Frame, ...]:
    """Return the calls that led to an equation, outermost first."""
    found = e.jaxpr_eqn.source_info.traceback
    return tuple(zip(*found.raw_frames(), strict=True))[::-1] if found else ()


def _shared(chains: Sequence[tuple[Frame, ...]]) -> int:
    """Return the number of outermost functions common to all call stacks: the step, and the loss itself."""
    depth = 0
    for level in zip(*chains, strict=False):
        if len({code for code, _ in level}) > 1:
            break
        depth += 1
    return depth


def _name(frame: Frame) -> str | None:
    """Return the displayed name of a function; None for functions of libraries.

    A module's `__call__` has the name of the module, also in libraries other than jax and this package.
    """
    file, name = frame[0].co_filename, frame[0].co_qualname.rpartition("<locals>.")[2]
    module = name.endswith(".__call__") and not is_package_file(file) and "/jax/" not in file.replace("\\", "/")
    if name.startswith("<") or not (module or is_user_file(file)):
        return None
    return name.removesuffix(".__call__")


def _path(e: Equation) -> str:
    return str(e.jaxpr_eqn.source_info.name_stack)
