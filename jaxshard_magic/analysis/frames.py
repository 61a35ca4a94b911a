"""Whose code an operation of a compiled program comes from: the source tables of HLO text, read once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..program.lines import is_ours, is_users, runs_steps

_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_FIELD = re.compile(r"(\w+)=(-?\d+)")


@dataclass(frozen=True)
class Frame:
    """One call: `function` at `line` of `file`, as Python knows the file."""

    file: str
    function: str
    line: int


class Frames:
    """The calls that led to the operations of a program, by the `stack_frame_id` in their metadata.

    `header` is the text before the first computation; without source tables every chain is empty.
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
        # Frames come after the one that called them; where the first names itself, parents are counted from one on.
        self._shift = int(self._frames.get(1, {}).get("parent_frame_id", 0) == 1)
        self._known: dict[int, tuple[Frame, ...]] = {}

    def __getitem__(self, number: int) -> tuple[Frame, ...]:
        """The user's calls inside the step, outermost first; empty where there are none."""
        if number not in self._known:
            self._known[number] = _inside(self._chain(number))
        return self._known[number]

    def _chain(self, number: int) -> list[Frame]:
        chain = []
        while number in self._frames and len(chain) < len(self._frames):
            row = self._frames[number]
            place = self._places.get(row.get("file_location_id", 0))
            chain += [place] if place else []
            number = row.get("parent_frame_id", 0) - self._shift
        return chain[::-1]


def called(traceback: Any) -> tuple[Frame, ...]:
    """The user's calls that led to an equation, from its jax traceback, as `Frames` has them of what it is compiled to;
    none for None."""
    chain = [Frame(f.file_name, f.function_name, f.line_num) for f in (traceback.frames if traceback else ())]
    return _inside(chain[::-1])


def _inside(chain: Sequence[Frame]) -> tuple[Frame, ...]:
    """The user's calls that the step itself made, of all that led to an operation.

    jax puts the calls of a body behind those of the equation that has it, each from the step on. A library's function
    that it traced for an earlier step has that step's, and is left out.
    """
    runs: list[list[Frame]] = [[]]  # behind each stretch of ours that runs a step
    for frame in chain:
        if runs_steps(frame.file):
            runs += [[]] if runs[-1] or len(runs) == 1 else []
        elif is_users(frame.file):
            runs[-1].append(frame)
    inside = [run for run in runs[1:] if run]
    if inside:
        return tuple(next(run for run in reversed(inside) if run[0].file == inside[0][0].file))
    first = next((i for i, frame in enumerate(chain) if is_ours(frame.file)), 0)
    return tuple(frame for frame in chain[first:] if is_users(frame.file)) if len(runs) == 1 else ()


def _tables(header: str) -> dict[str, str]:
    """The text of each table, from its name on a line of its own to the next one's."""
    heads = {m[0]: m for m in re.finditer(rf"^(?:{'|'.join(_TABLES)})$", header, re.MULTILINE)}
    ends = sorted([m.start() for m in heads.values()] + [len(header)])
    found = {name: header[m.end() : next(e for e in ends if e > m.start())] for name, m in heads.items()}
    return {name: found.get(name, "") for name in _TABLES}


def _strings(table: str) -> dict[int, str]:
    return {int(n): _unescaped(text.strip()[1:-1]) for n, text in _ROW.findall(table)}


def _unescaped(text: str) -> str:
    """C's escapes, in which HLO writes bytes that are not ASCII."""
    if "\\" not in text:
        return text
    raw = text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    return raw.encode("latin-1", "replace").decode("utf-8", "replace")


def _rows(table: str) -> dict[int, dict[str, int]]:
    return {int(n): {k: int(v) for k, v in _FIELD.findall(text)} for n, text in _ROW.findall(table)}
