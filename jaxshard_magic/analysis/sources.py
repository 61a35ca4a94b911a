"""Lines of the user's code: the Python frames behind operations of a compiled program, and the source text of a report.

HLO text has the frames in its source tables.
"""

import ast
import linecache
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..code_locations import file_label, is_cell_file
from ..program.source_lines import is_package_file, is_step_runner_file, is_user_file
from ..report import SourceExcerpt

MOST_LINES = 2000  # lines of a cell; of a longer one an excerpt is shown
AROUND = 3  # lines of context before and after a line of the report
CHANGED = "this file has changed since the step was traced"
GONE = "the text of this code can't be read any more"

_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r"(\w+)=(-?\d+)")


@dataclass(frozen=True)
class Frame:
    """Python stack frame.

    Attributes:
        file: File, by the name used by Python.
        function: Function name.
        line: Line number.
    """

    file: str
    function: str
    line: int


class Frames:
    """Stack frames of a program's operations, by the `stack_frame_id` in their metadata.

    Args:
        header: Text before the first computation. Without source tables every stack is empty.
    """

    def __init__(self, header: str):
        tables = _tables(header)
        files, functions = (_strings(tables[name]) for name in _TABLES[:2])
        self._places = {
            number: Frame(
                files.get(row.get("file_name_id", 0), ""),
                functions.get(row.get("function_name_id", 0), ""),
                row.get("line", 0),
            )
            for number, row in _rows(tables["FileLocations"]).items()
        }
        self._frames = _rows(tables["StackFrames"])
        # A caller comes before the frames that it calls. Where the first frame names itself, parent ids are larger by
        # one, and 1 stands for no parent.
        self._shift = int(self._frames.get(1, {}).get("parent_frame_id", 0) == 1)
        self._known: dict[int, tuple[Frame, ...]] = {}

    def __getitem__(self, number: int) -> tuple[Frame, ...]:
        """Return the user's frames inside the step, outermost first; empty if there are none."""
        if number not in self._known:
            self._known[number] = _frames_in_step(self._chain(number))
        return self._known[number]

    def _chain(self, number: int) -> list[Frame]:
        chain = []
        while number in self._frames and len(chain) < len(self._frames):
            row = self._frames[number]
            place = self._places.get(row.get("file_location_id", 0))
            chain += [place] if place else []
            number = row.get("parent_frame_id", 0) - self._shift
        return chain[::-1]


def frames_of_traceback(traceback: Any) -> tuple[Frame, ...]:
    """Return the user's frames behind an equation, from the equation's JAX traceback; empty for None.

    The result equals the frames of the compiled operations of the equation.
    """
    chain = [Frame(f.file_name, f.function_name, f.line_num) for f in (traceback.frames if traceback else ())]
    # A JAX traceback begins with the innermost frame.
    return _frames_in_step(chain[::-1])


def _frames_in_step(chain: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the user's frames inside the step, of all frames behind an operation."""
    # JAX appends the frames of a body to those of the equation with the body, each stack starting at the step. A
    # library function traced for an earlier step has the stack of that step, left out here.
    runs: list[list[Frame]] = [[]]  # user frames behind each stretch of package frames that runs a step
    for frame in chain:
        if is_step_runner_file(frame.file):
            runs += [[]] if runs[-1] or len(runs) == 1 else []
        elif is_user_file(frame.file):
            runs[-1].append(frame)
    inside = [run for run in runs[1:] if run]
    if inside:
        return tuple(next(run for run in reversed(inside) if run[0].file == inside[0][0].file))
    first = next((i for i, frame in enumerate(chain) if is_package_file(frame.file)), 0)
    return tuple(frame for frame in chain[first:] if is_user_file(frame.file)) if len(runs) == 1 else ()


def _tables(header: str) -> dict[str, str]:
    """Return the text of each source table, by name."""
    heads = {m[0]: m for m in re.finditer(rf"^(?:{'|'.join(_TABLES)})$", header, re.MULTILINE)}
    ends = sorted([m.start() for m in heads.values()] + [len(header)])
    found = {name: header[m.end() : next(e for e in ends if e > m.start())] for name, m in heads.items()}
    return {name: found.get(name, "") for name in _TABLES}


def _strings(table: str) -> dict[int, str]:
    return {int(n): _unescaped(text.strip()[1:-1]) for n, text in _ROW.findall(table)}


def _unescaped(text: str) -> str:
    """Decode C escapes, used by HLO for non-ASCII bytes."""
    if "\\" not in text:
        return text
    raw = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    return raw.encode("latin-1", "replace").decode("utf-8", "replace")


def _rows(table: str) -> dict[int, dict[str, int]]:
    return {int(n): {k: int(v) for k, v in _FIELD.findall(text)} for n, text in _ROW.findall(table)}


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
