"""The text of the user's code that a report's lines are of."""

import ast
import linecache
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..cell_files import is_cell_file
from ..places import name_of
from ..report import Source
from .frames import Frame

MOST_LINES = 2000  # of a cell
AROUND = 3  # lines of a file on either side of one that matters
CHANGED = "this file has changed since the step was traced"
GONE = "the text of this code can't be read any more"


class SourceText:
    """Files as they are now, read once; lines of a file that has changed since are not guessed at."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._functions: dict[str, list[tuple[int, int, str]]] = {}
        self.notes: dict[str, str] = {}

    def lines(self, file: str) -> list[str]:
        if file not in self._lines:
            linecache.checkcache(file)
            self._lines[file] = [line.rstrip("\r\n") for line in linecache.getlines(file)]
            if not self._lines[file]:
                self.notes[file] = GONE
        return self._lines[file]

    def line(self, frame: Frame) -> str | None:
        """The text of a frame's line; None where it can't be read, or another function stands there now."""
        lines = self.lines(frame.file)
        if not lines:
            return None
        if not 0 < frame.line <= len(lines) or not self._holds(frame):
            self.notes[frame.file] = CHANGED
        if frame.file in self.notes:
            return None
        return lines[frame.line - 1].strip()

    def _holds(self, frame: Frame) -> bool:
        """Does the frame's function still stand around its line? Lambdas and comprehensions have no names to ask."""
        name = frame.function.rpartition(".")[2]
        if not name.isidentifier():
            return True
        if frame.file not in self._functions:
            self._functions[frame.file] = list(_functions("\n".join(self.lines(frame.file))))
        around = self._functions[frame.file]
        return not around or any(a <= frame.line <= b and name == n for a, b, n in around)


def sources(
    lines: Mapping[str, Iterable[int]],
    text: SourceText,
    home: Iterable[str],
    names: Mapping[str, str],
) -> tuple[Source, ...]:
    """The sources of a report: those of `home` first, then the files of `lines` (numbers by file), by their `names`.

    A cell is shown whole, of a file what lies around the lines.
    """
    first = list(dict.fromkeys(file for file in home if file))
    order = [*first, *sorted(set(lines) - set(first), key=lambda file: (-len(list(lines[file])), file))]
    return tuple(_source(file, set(lines.get(file, ())), text, file in first, names[file]) for file in order)


def _source(file: str, wanted: set[int], text: SourceText, home: bool, name: str) -> Source:
    lines = text.lines(file)
    if file in text.notes:
        return Source(name, (), (), home, text.notes[file])
    numbers = range(1, len(lines) + 1)
    if not is_cell(file) or len(lines) > MOST_LINES:
        near = {n + d for n in wanted for d in range(-AROUND, AROUND + 1)}
        numbers = [n for n in numbers if n in near]
    return Source(name, tuple(numbers), tuple(lines[n - 1] for n in numbers), home)


def is_cell(file: str) -> bool:
    """Was the code typed into a notebook or a terminal? IPython keeps no such file, or one that is in no folder."""
    return is_cell_file(file) or file.startswith("<") or not Path(file).exists()


def distinct_names(files: Iterable[str]) -> dict[str, str]:
    """The reader's name of each file, no two alike: files of one name with their folders, cells with a number.

    >>> distinct_names(["/x/a/model.py", "/x/b/model.py", "/x/data.py"])
    {'/x/a/model.py': 'a/model.py', '/x/b/model.py': 'b/model.py', '/x/data.py': 'data.py'}
    """
    names = {file: name_of(file) for file in files}
    paths = {file: Path(file).parts for file, name in names.items() if Path(file).name == name}
    for depth in range(2, 1 + max(map(len, paths.values()), default=0)):
        taken = Counter(names.values())
        names |= {file: "/".join(parts[-depth:]) for file, parts in paths.items() if taken[names[file]] > 1}
    seen = Counter[str]()
    for file, name in names.items():
        seen[name] += 1
        names[file] = name if seen[name] == 1 else f"{name} ({seen[name]})"
    return names


def _functions(text: str) -> Iterable[tuple[int, int, str]]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell with magics in it, or a file that is being edited
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield first, node.end_lineno or node.lineno, node.name
