"""Names that a cell reads, hosts lack and the kernel has: modules are imported there, definitions of earlier cells run,
small values go along. For anything else a line names the cell that made it, to run again."""

import ast
import builtins
import pickle
import re
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..errors import ShardError
from ..units import byte_text
from . import cells
from .displays import say

if TYPE_CHECKING:
    from ..hosts.cluster import Cluster

SMALL = 2**24  # bytes of a value that goes along: a tenth of a second to each of two hosts
_OF_THE_SHELL = {"In", "Out", "get_ipython", "exit", "quit", "open", "display"}


class Names:
    """What the hosts of a cluster have of the notebook's names."""

    def __init__(self, shell: Any, cluster: "Cluster"):
        self._shell, self._cluster = shell, cluster
        self._there: set[str] = set()

    def defined(self, text: str) -> None:
        """A cell ran there: what it binds is there."""
        self._there |= _bound(text)

    def bring(self, text: str) -> None:
        """Give the hosts what a cell reads, they lack and the kernel has; what that was is said. Raises ShardError for
        a value that is neither small nor can be made there, before anything is sent."""
        from ..hosts import engine

        wanted = {name for name in _read(text) if self._is_ours(name)}
        if not wanted:
            return
        lacking = self._cluster.call(engine.lacking, sorted(wanted), host=0)
        self._there |= wanted - set(lacking)
        texts, values, told = self._parts(lacking)
        if texts:
            self._cluster.call(engine.define, "\n".join(texts))
        if values:
            self._cluster.call(engine.take, values)
        if told:
            say(f"to the hosts: {', '.join(told)}")
            self._there |= set(lacking)

    def _is_ours(self, name: str) -> bool:
        return (
            name not in self._there
            and name not in _OF_THE_SHELL
            and name[:1] != "_"
            and name in self._shell.user_ns
            and not hasattr(builtins, name)
        )

    def _parts(self, names: Iterable[str]) -> tuple[list[str], dict[str, Any], list[str]]:
        texts, values, told, seen = [], {}, [], set[str]()
        todo = list(names)
        while todo:
            name = todo.pop(0)
            if name in seen:
                continue
            seen.add(name)
            value = self._shell.user_ns[name]
            if (line := cells.as_text(name, value)) is not None:
                texts.insert(0, line)
                told.append(name)
            elif (source := self._definition(name)) is not None:
                more = [each for each in _read(source) if self._is_ours(each) and each not in seen]
                texts.append(source)
                todo = [*more, *todo]
                told.append(f"{name}, defined in an earlier cell")
            elif (size := _pickled(value)) is not None and size <= SMALL:
                values[name] = value
                told.append(f"{name}, {byte_text(size)}")
            else:
                raise ShardError(self._elsewhere(name, size))
        return [*_imports_first(texts)], values, told

    def _elsewhere(self, name: str, size: int | None) -> str:
        number = next(
            (
                n
                for n in range(len(self._shell.user_ns.get("In", ())) - 1, 0, -1)
                if name in self._bound_by(n)
            ),
            None,
        )
        which = "the cell that makes it" if number is None else f"cell [{number}], which makes it,"
        held = "" if size is None else f" and takes {byte_text(size)}"
        return f"{name} is in this kernel{held}, and not on the hosts: run {which} again, there"

    def _definition(self, name: str) -> str | None:
        """The text of the function or class that a cell defines under a name; None where the last cell that binds it
        does so otherwise."""
        inputs = self._shell.user_ns.get("In", ())
        for text in reversed(inputs[1:]):
            if name not in _bound(text):
                continue
            tree, body = parsed(text)
            found = [
                node
                for node in ([] if tree is None else tree.body)
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
                and node.name == name
            ]
            if not found:
                return None
            lines = body.splitlines()
            first = min([found[-1].lineno, *(each.lineno for each in found[-1].decorator_list)])
            return "\n".join(lines[first - 1 : found[-1].end_lineno])
        return None

    def _bound_by(self, number: int) -> set[str]:
        return _bound(self._shell.user_ns["In"][number])


def _imports_first(texts: list[str]) -> list[str]:
    return sorted(texts, key=lambda text: not text.startswith(("import ", "from ")))


def parsed(text: str) -> tuple[ast.Module | None, str]:
    """A cell parsed, without the line of its cell magic and with `pass` for those of others, and that text; None where
    it is no Python."""
    body = re.sub(r"\A\s*%%[^\n]*\n?", "", text)
    body = re.sub(r"^([ \t]*)[%!][^\n]*$", r"\1pass", body, flags=re.MULTILINE)
    with suppress(SyntaxError):
        return ast.parse(body), body
    return None, body


def _read(text: str) -> list[str]:
    """The names that a cell, or a definition, reads."""
    tree, _ = parsed(text)
    if tree is None:
        return []
    return [
        *dict.fromkeys(
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
        )
    ]


def _bound(text: str) -> set[str]:
    """The names that a cell binds, as far as its text tells."""
    tree, _ = parsed(text)
    if tree is None:
        return set()
    found = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


def _pickled(value: Any) -> int | None:
    """Bytes that a value takes on its way; None where it can't go."""
    if isinstance(value, ModuleType) or not _is_data(value):
        return None
    try:
        return len(pickle.dumps(value))
    except Exception:  # whatever a class of the user's raises when it is taken apart
        return None


def _is_data(value: Any, depth: int = 4) -> bool:
    """Numbers, text, arrays and what is made of them: a value that means the same on the hosts."""
    import jax
    import numpy as np

    if isinstance(
        value, jax.Array | np.ndarray | np.generic | bool | int | float | complex | str | bytes | type(None)
    ):
        return True
    if not depth or not isinstance(value, dict | list | tuple | set | frozenset):
        return False
    parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return all(_is_data(part, depth - 1) for part in parts)
