"""Read the source tables of HLO text: the user's Python frames behind each operation of a compiled program."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..program.source_lines import is_package_file, is_step_runner_file, is_user_file

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
