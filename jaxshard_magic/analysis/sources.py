"""Source text of the user's code for the lines of a report."""

import ast
import linecache
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..code_locations import file_label, is_cell_file
from ..report import SourceExcerpt
from .frames import Frame

MOST_LINES = 2000  # lines of a cell; of a longer one an excerpt is shown
AROUND = 3  # lines of context before and after a line of the report
CHANGED = "this file has changed since the step was traced"
GONE = "the text of this code can't be read any more"


class SourceText:
    """Reader of source files as they are now, each read once.

    A file changed since tracing gives no lines, rather than guesses; `notes` has the reason by file.
    """

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}
        self._functions: dict[str, list[tuple[int, int, str]]] = {}
        self.notes: dict[str, str] = {}

    def lines(self, file: str) -> list[str]:
        """Return the lines of a file without line ends; [] where unreadable."""
        if file not in self._lines:
            # Without this, `linecache` returns the text of an earlier version of the file.
            linecache.checkcache(file)
            self._lines[file] = [line.rstrip("\r\n") for line in linecache.getlines(file)]
            if not self._lines[file]:
                self.notes[file] = GONE
        return self._lines[file]

    def line(self, frame: Frame) -> str | None:
        """Return the text of a frame's line; None where it is unreadable, or where another function is there now."""
        lines = self.lines(frame.file)
        if not lines:
            return None
        if not 0 < frame.line <= len(lines) or not self._holds(frame):
            self.notes[frame.file] = CHANGED
        if frame.file in self.notes:
            return None
        return lines[frame.line - 1].strip()

    def _holds(self, frame: Frame) -> bool:
        """Return whether the frame's function still contains the frame's line."""
        name = frame.function.rpartition(".")[2]
        # Lambdas and comprehensions have no name to look for.
        if not name.isidentifier():
            return True
        if frame.file not in self._functions:
            self._functions[frame.file] = list(_functions("\n".join(self.lines(frame.file))))
        around = self._functions[frame.file]
        return not around or any(a <= frame.line <= b and name == n for a, b, n in around)


def sources(
    lines: Mapping[str, Iterable[int]], text: SourceText, home: Iterable[str], names: Mapping[str, str]
) -> tuple[SourceExcerpt, ...]:
    """Return the sources of a report: the files of `home` first, then the others by number of lines.

    A cell is shown whole. Of a file the lines near those of the report are shown.

    Args:
        lines: Line numbers, by file.
        text: The user's files.
        home: Files to list first.
        names: Reader's name of each file.
    """
    first = list(dict.fromkeys(file for file in home if file))
    order = [*first, *sorted(set(lines) - set(first), key=lambda file: (-len(list(lines[file])), file))]
    return tuple(_source(file, set(lines.get(file, ())), text, file in first, names[file]) for file in order)


def _source(file: str, wanted: set[int], text: SourceText, home: bool, name: str) -> SourceExcerpt:
    lines = text.lines(file)
    if file in text.notes:
        return SourceExcerpt(name, (), (), home, text.notes[file])
    numbers = range(1, len(lines) + 1)
    if not is_cell(file) or len(lines) > MOST_LINES:
        near = {n + d for n in wanted for d in range(-AROUND, AROUND + 1)}
        numbers = [n for n in numbers if n in near]
    return SourceExcerpt(name, tuple(numbers), tuple(lines[n - 1] for n in numbers), home)


def is_cell(file: str) -> bool:
    """Return whether the code was typed into a notebook or a terminal."""
    # Typed code has no file on disk; its name often is in angle brackets.
    return is_cell_file(file) or file.startswith("<") or not Path(file).exists()


def distinct_names(files: Iterable[str]) -> dict[str, str]:
    """Return a unique reader's name of each file: equal file names get their folders, and cells a number.

    >>> distinct_names(["/x/a/model.py", "/x/b/model.py", "/x/data.py"])
    {'/x/a/model.py': 'a/model.py', '/x/b/model.py': 'b/model.py', '/x/data.py': 'data.py'}
    """
    names = {file: file_label(file) for file in files}
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
    """Yield first line (decorators included), last line and name of each function in `text`."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # a cell with magics in it, or a file that is being edited
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            yield first, node.end_lineno or node.lineno, node.name
