"""Source text of the user's cells: statements, syntax trees and spans of expressions."""

import ast
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

_USUAL = {"jax": "jax", "lax": "jax.lax", "nnx": "flax.nnx", "eqx": "equinox"}
_USUAL |= {"flax": "flax", "equinox": "equinox"}


@dataclass(frozen=True)
class SourceSpan:
    """Span of an expression in a file.

    Attributes:
        file: Name of the file.
        line: First line, counted from 1.
        column: First column, in bytes of UTF-8.
        end_line: Last line.
        end_column: Column after the last byte.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class UserStatement:
    """A top-level statement of the user's cells.

    Attributes:
        text: Source text.
        file: Python's name for the cell; empty for text without a cell.
        line: First line of the statement in that file.
        title: Name of the cell for readers.
        byte_offset: Bytes of its first line that belong to another statement.
        imports: Whether the statement imports.
        calls_step: Whether the statement calls the step when it runs.
        binds_step: Whether the statement binds the step's name.
        precedes_imports: Whether the statement comes before imports because it affects them (`os.environ`, `sys.path`).
    """

    text: str
    file: str
    line: int
    title: str
    byte_offset: int = 0
    imports: bool = False
    calls_step: bool = False
    binds_step: bool = False
    precedes_imports: bool = False

    @property
    def lines(self) -> range:
        """Lines of the statement in its file."""
        return range(self.line, self.line + self.text.count("\n") + 1)


@dataclass(frozen=True)
class Cells:
    """Cells that contain the user's statements, by Python's file names.

    Attributes:
        source_lines: Lines of each cell.
        trees: Syntax tree of each cell.
        statement_lines: Line numbers of the program's statements.
        imports: Full names of imported names, `{"jnp": "jax.numpy"}`.
        program_name: Function from a name of the generated program (`hold`, `P`) to a form free in the user's text.
    """

    source_lines: Mapping[str, list[str]]
    trees: Mapping[str, ast.Module]
    statement_lines: Mapping[str, set[int]]
    imports: Mapping[str, str]
    program_name: Callable[[str], str]

    def find_calls(self, functions: Collection[str]) -> Iterator[tuple[str, ast.Call]]:
        """Yield the file and node of each call of some functions; calls without positional arguments are left out.

        Args:
            functions: Full names, such as `jax.lax.scan`.
        """
        for file, tree in self.trees.items():
            calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args)
            for call in calls:
                if call.lineno in self.statement_lines[file] and full_name(call, self.imports) in functions:
                    yield file, call

    def module(self, full: str) -> str | None:
        """Return the cells' name for a module, or None where no cell imports it by name."""
        return next((name for name, module in self.imports.items() if module == full), None)


def cells_of(pieces: Sequence[UserStatement], name: Callable[[str], str]) -> Cells:
    """Return the cells of these statements; cells without text are left out.

    Args:
        pieces: The user's statements.
        name: Function from a name of the generated program to a form free in the user's text.
    """
    # IPython puts the source of each cell into `linecache`.
    files = {piece.file: linecache.getlines(piece.file) for piece in pieces}
    trees = {file: ast.parse("".join(lines)) for file, lines in files.items() if lines}
    lines = {file: {n for p in pieces if p.file == file for n in p.lines} for file in trees}
    # Imports added for the program belong to no cell, so no tree has them.
    imports = imported_names(*trees.values(), *(ast.parse(p.text) for p in pieces if p.imports))
    return Cells(files, trees, lines, imports, name)


def span_of(node: ast.expr, file: str) -> SourceSpan:
    """Return the span of an expression."""
    end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return SourceSpan(file, node.lineno, node.col_offset, *end)


def imported_names(*trees: ast.Module) -> dict[str, str]:
    """Return the full names of all imported names, such as `{"jnp": "jax.numpy", "grad": "jax.grad"}`."""
    names: dict[str, str] = {}
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
            names |= {root: root for a in node.names if not a.asname for root in [a.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def full_name(call: ast.Call, imports: Mapping[str, str]) -> str:
    """Return the full name of the called function, such as `jax.lax.scan`.

    Empty where the name is neither imported nor the usual name of a module.
    """
    root, dot, rest = ast.unparse(call.func).partition(".")
    full = imports.get(root) or _USUAL.get(root)
    return full + dot + rest if full else ""
