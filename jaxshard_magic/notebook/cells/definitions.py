"""Functions and classes that cells define, as the statements that do it."""

import ast
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from .code import number_of
from .names import in_scope, plain_function
from .statements import Statement, Unit
from .texts import functions_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """The statements that make a function or a class what it is: its own, and those that complete it, such as
    `f.defvjp(...)` and `register_dataclass(Config, ...)`.

    Attributes:
        parts: Of each cell that has some, its file and their places among all statements of its text.
        reads: The names that they read when they run.
        reads_later: The names that functions in them read when they are called.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    reads: frozenset[str]
    reads_later: frozenset[str]


class Definitions:
    """What the cells of a notebook define that have run in this kernel."""

    def __init__(self, shell: "InteractiveShell"):
        self._shell = shell

    def text_of(self, file: str) -> tuple[int | None, str]:
        """The number of the cell that Python knows by a file's name, None for what is no cell, and its text; "" where
        that is not known."""
        return number_of(self._shell, file), "".join(linecache.getlines(file))

    def alone(self, file: str, places: Iterable[int]) -> str:
        """The text of a cell below its magic's line with these statements alone, each on its lines."""
        text = self.text_of(file)[1]
        statements, lines = _statements(text), text.split("\n")
        kept = {n for i in places for n in range(statements[i].first - 1, statements[i].node.end_lineno or 0)}
        return "\n".join(line if n in kept else "" for n, line in enumerate(lines) if n)

    def of(self, name: str, value: Any) -> Definition | None:
        """What defines `value`, a function, what a decorator made of one, or a class, under the name `name` at the top
        of a cell; None for anything else."""
        for number, file in self._files_of(value):
            statements = _statements(self.text_of(file)[1])
            found = [i for i, s in enumerate(statements) if _defines(s, name)]
            if found:
                parts = [(file, [found[-1], *_completing(statements, found[-1] + 1, name)])]
                later = (other for n, other in self._cells if number is not None and n > number)
                parts += [(each, _completing(_statements(self.text_of(each)[1]), 0, name)) for each in later]
                return _definition([(each, places) for each, places in parts if places], self)
        return None

    def _files_of(self, value: Any) -> list[tuple[int | None, str]]:
        """Where a definition may stand: in the file of a function of its own, else in any cell, the last first."""
        function = None if isinstance(value, type) else plain_function(value)
        functions = functions_of(value) if isinstance(value, type) else [function] if function else []
        files = dict.fromkeys(each.__code__.co_filename for each in functions)
        known = [(number_of(self._shell, file), file) for file in files if linecache.getlines(file)]
        # Methods that dataclasses write are of "<string>", of which Python 3.13 knows lines: what `python -c` runs.
        known = [(number, file) for number, file in known if number is not None or not file.startswith("<")]
        return known or [*reversed(self._cells)]

    @cached_property
    def _cells(self) -> list[tuple[int, str]]:
        """All cells by number, and their files."""
        files = [(number_of(self._shell, file), file) for file in list(linecache.cache)]
        return sorted((number, file) for number, file in files if number is not None)


def _definition(parts: list[tuple[str, list[int]]], definitions: Definitions) -> Definition:
    statements = [_statements(definitions.text_of(file)[1])[i] for file, places in parts for i in places]
    return Definition(
        tuple((file, tuple(places)) for file, places in parts),
        frozenset().union(*(s.reads for s in statements)),
        frozenset().union(*(s.reads_later for s in statements)),
    )


@lru_cache(maxsize=256)
def _statements(text: str) -> list[Statement]:
    return Unit("", text).statements


def _defines(s: Statement, name: str) -> bool:
    """Whether a statement is, or has in its blocks, the definition of a name."""
    return any(isinstance(part, _DEFINITIONS) and part.name == name for part in in_scope(s.node))


def _completing(statements: list[Statement], first: int, name: str) -> list[int]:
    """The places, from `first` on, of statements that call a method of what has the name, or register it."""
    return [first + i for i, s in enumerate(statements[first:]) if any(_completes(s, name))]


def _completes(s: Statement, name: str) -> Iterator[bool]:
    if not isinstance(s.node, ast.Expr) or not isinstance(call := s.node.value, ast.Call):
        return
    if isinstance(called := call.func, ast.Attribute):
        yield isinstance(called.value, ast.Name) and called.value.id == name and called.attr.startswith("def")
    last = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    yield "register" in last and any(isinstance(each, ast.Name) and each.id == name for each in call.args)
