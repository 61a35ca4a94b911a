"""The user's text that a program is made of: its statements, and what stands where in it."""

import ast
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

_USUAL = {"jax": "jax", "lax": "jax.lax", "nnx": "flax.nnx", "eqx": "equinox"}
_USUAL |= {"flax": "flax", "equinox": "equinox"}


@dataclass(frozen=True)
class Place:
    """Where an expression stands in its file: lines from 1, columns in bytes of UTF-8."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Piece:
    """A statement of the user's.

    `file` is what Python calls its cell, and `line` its first line there; `before`: how many bytes of that line are
    another statement's; `title`: the cell as a reader knows it. `imports`: does it import; `calls`: does it call the
    step when it runs; `makes`: does it give the step its name; `early`: it comes before imports, as it
    changes what they find.
    """

    text: str
    file: str
    line: int
    title: str
    before: int = 0
    imports: bool = False
    calls: bool = False
    makes: bool = False
    early: bool = False

    @property
    def lines(self) -> range:
        return range(self.line, self.line + self.text.count("\n") + 1)


@dataclass(frozen=True)
class Cells:
    """The cells that pieces stand in, by what Python calls them: the lines of each one's text, its tree, and the
    numbers of those lines that are pieces.

    `imports`: what imported names stand for; `name` gives what the program calls a thing of its own.
    """

    files: Mapping[str, list[str]]
    trees: Mapping[str, ast.Module]
    lines: Mapping[str, set[int]]
    imports: Mapping[str, str]
    name: Callable[[str], str]

    def calls(self, functions: Collection[str]) -> Iterator[tuple[str, ast.Call]]:
        """The calls with arguments that stand in pieces, of functions by their full names, each with its file."""
        for file, tree in self.trees.items():
            calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args)
            for call in calls:
                if call.lineno in self.lines[file] and full_name(call, self.imports) in functions:
                    yield file, call

    def module(self, full: str) -> str | None:
        """What the cells call a module; None where they import it by no name."""
        return next((name for name, module in self.imports.items() if module == full), None)


def cells_of(pieces: Sequence[Piece], name: Callable[[str], str]) -> Cells:
    """Those that the pieces stand in, but for cells without text."""
    files = {piece.file: linecache.getlines(piece.file) for piece in pieces}
    trees = {file: ast.parse("".join(lines)) for file, lines in files.items() if lines}
    lines = {file: {n for p in pieces if p.file == file for n in p.lines} for file in trees}
    imports = imported(*trees.values(), *(ast.parse(p.text) for p in pieces if p.imports))
    return Cells(files, trees, lines, imports, name)


def place_of(node: ast.expr, file: str) -> Place:
    end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return Place(file, node.lineno, node.col_offset, *end)


def imported(*trees: ast.Module) -> dict[str, str]:
    """What the names stand for that texts import, as `{"jnp": "jax.numpy", "grad": "jax.grad"}`."""
    names: dict[str, str] = {}
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
            names |= {root: root for a in node.names if not a.asname for root in [a.name.partition(".")[0]]}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def full_name(call: ast.Call, imports: Mapping[str, str]) -> str:
    """That of the function which is called, as `jax.lax.scan`; empty for what is neither imported nor a module's usual
    name."""
    root, dot, rest = ast.unparse(call.func).partition(".")
    full = imports.get(root) or _USUAL.get(root)
    return full + dot + rest if full else ""
