"""Locations in the user's code for readers: `cell [3], line 4` in text, `[3]:4` in tables.

IPython in a terminal, ipykernel and Colab each give cells file names of their own, which `is_cell_file` knows.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

Numbering = Callable[[Any, str], int | None]  # (shell, file name) to the number of a cell; None for no cell
_numberings: WeakKeyDictionary[Any, Numbering] = WeakKeyDictionary()  # by shell, the latest registered last
_CELL = re.compile(
    r"<ipython-input-(?P<terminal>\d+)-\w+>"
    r"|.*[/\\]ipykernel_\d+[/\\]\d+\.py"
    r"|.*[/\\]ipython-input-(?:(?P<colab>\d+)-)?\d+\.py"
)
# Regular expression for the part of a cell's file name with the number of a kernel or a cell. Without it, the same cell
# has the same name in every session.
OF_ONE_SESSION = r"(?<=/)ipykernel_\d+/|(?<=[</]ipython-input-)\d+-"


def number_cells(shell: object, number_of: Numbering) -> None:
    """Register a numbering of cells, in force as long as the shell lives.

    Args:
        shell: The notebook's shell.
        number_of: Called with shell and file name; returns the cell's number, None for no cell.
    """
    _numberings[shell] = number_of


def forget_cells(shell: object) -> None:
    """Undo `number_cells`."""
    _numberings.pop(shell, None)


def cell_name(number: int) -> str:
    """Return `cell [3]`: the number as notebooks show it."""
    return f"cell [{number}]"


def file_label(file: str) -> str:
    """Return the displayed name of a file: a cell's number, or the file's own name.

    >>> file_label("<ipython-input-3-0a1b>"), file_label("/home/me/models/gpt.py")
    ('cell [3]', 'gpt.py')
    """
    # The shell registered last decides first.
    found = (number_of(shell, file) for shell, number_of in reversed([*_numberings.items()]))
    number = next((each for each in found if each is not None), None) or cell_number(file)
    if number is not None:
        return cell_name(number)
    if is_cell_file(file):
        return "a cell"
    return file if file.startswith("<") else Path(file).name


def location_text(file: str | None, line: int) -> str:
    """Return the location of a line in words.

    Args:
        file: Name of the file in Python. None for an unknown file, with the line alone as result.
        line: Line number.

    >>> location_text("/home/me/models/gpt.py", 12), location_text("<ipython-input-3-0a1b>", 4)
    ('gpt.py, line 12', 'cell [3], line 4')
    """
    return line_text(None if file is None else file_label(file), line)


def line_text(name: str | None, line: int) -> str:
    """Return the location of a line in a file by its displayed name.

    Args:
        name: Displayed name. None, or a name in angle brackets (typed code), gives the line alone.
        line: Line number.

    >>> line_text("models/gpt.py", 12), line_text("<stdin>", 3)
    ('models/gpt.py, line 12', 'line 3')
    """
    return f"line {line}" if name is None or name.startswith("<") else f"{name}, line {line}"


def lines_text(file: str | None, lines: Sequence[int]) -> str:
    """Return the location of several lines of a file.

    Args:
        file: Name of the file in Python.
        lines: Line numbers.

    >>> lines_text("/home/me/gpt.py", [3]), lines_text("/home/me/gpt.py", [3, 7])
    ('gpt.py, line 3', 'gpt.py, lines 3 and 7')
    """
    if len(lines) == 1:
        return location_text(file, lines[0])
    said = f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]}"
    name = None if file is None else file_label(file)
    return said if name is None or name.startswith("<") else f"{name}, {said}"


def location_with_caller(file: str | None, line: int, called: str | None) -> str:
    """Return the location of a line, followed by the line that called it.

    Args:
        file: Name of the file in Python.
        line: Line number.
        called: Calling line as `FILE:LINE`, with the file's name in Python; None without one.

    >>> location_with_caller("/home/me/gpt.py", 12, "<ipython-input-3-0a1b>:4")
    'gpt.py, line 12, called at cell [3], line 4'
    """
    where = location_text(file, line)
    if called is None:
        return where
    name, _, number = called.rpartition(":")
    return f"{where}, called at {location_text(name, int(number))}"


def caller_text(called: str) -> str:
    """Return `called at cell [7], line 12` for a report's calling line, `NAME:LINE` with a displayed name.

    >>> caller_text("cell [7]:12"), caller_text("train.py:31")
    ('called at cell [7], line 12', 'called at train.py, line 31')
    """
    name, _, line = called.rpartition(":")
    return f"called at {line_text(name, int(line))}"


def short_location(name: str | None, line: int) -> str:
    """Return the location of a line for a table.

    Args:
        name: Displayed name. None, or a name in angle brackets (typed code), gives the line alone.
        line: Line number.

    >>> short_location("cell [3]", 4), short_location("models/gpt.py", 12), short_location("<stdin>", 3)
    ('[3]:4', 'models/gpt.py:12', '3')
    """
    return str(line) if name is None or name.startswith("<") else f"{name.removeprefix('cell ')}:{line}"


def is_cell_file(file: str) -> bool:
    """Return whether a file name is that of a notebook cell.

    >>> is_cell_file("<ipython-input-3-0a1b>"), is_cell_file("/tmp/ipykernel_81/2938.py"), is_cell_file("/tmp/gpt.py")
    (True, True, False)
    """
    return _CELL.fullmatch(file) is not None


def cell_number(file: str) -> int | None:
    """Return a cell's number from its file name, None where the name has none.

    >>> cell_number("<ipython-input-3-0a1b>"), cell_number("/tmp/ipython-input-4-2938.py"), cell_number("/tmp/gpt.py")
    (3, 4, None)
    """
    found = _CELL.fullmatch(file)
    number = found and (found["terminal"] or found["colab"])
    return int(number) if number else None
