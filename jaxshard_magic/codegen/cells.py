"""The user's text that a program is made of, as edits are made in it."""

import ast
import linecache
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from .edits import Edit, edited, imported
from .pieces import Piece


@dataclass(frozen=True)
class Cells:
    """By what Python calls a cell: the lines of its text, its tree, and the numbers of those lines that are pieces.

    `imports`: what imported names stand for; `name` gives what the program calls a thing of its own.
    """

    files: Mapping[str, list[str]]
    trees: Mapping[str, ast.Module]
    lines: Mapping[str, set[int]]
    imports: Mapping[str, str]
    name: Callable[[str], str]

    def edited(self, edits: Iterable[Edit]) -> dict[str, tuple[ast.Module, ast.Module]]:
        """The tree of each cell that has some of the edits, and that with them in its text."""
        by_file: dict[str, list[Edit]] = {}
        for e in edits:
            by_file.setdefault(e.place.file, []).append(e)
        return {
            file: (self.trees[file], ast.parse("".join(edited(self.files[file], 1, its))))
            for file, its in by_file.items()
        }


def cells_of(pieces: Sequence[Piece], name: Callable[[str], str]) -> Cells:
    """Those that the pieces stand in, but for cells without text."""
    files = {piece.file: linecache.getlines(piece.file) for piece in pieces}
    trees = {file: ast.parse("".join(lines)) for file, lines in files.items() if lines}
    lines = {file: {n for p in pieces if p.file == file for n in p.lines} for file in trees}
    imports = imported(*trees.values(), *(ast.parse(p.text) for p in pieces if p.imports))
    return Cells(files, trees, lines, imports, name)
