"""Places in the user's code as readers know them: `cell [3], line 4` in words, `[3]:4` in tables."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .cell_files import is_cell_file, number_in

Numbering = Callable[[Any, str], int | None]
_numberings: WeakKeyDictionary[Any, Numbering] = WeakKeyDictionary()  # by shell, the newest last


def number_cells(shell: object, number_of: Numbering) -> None:
    """From now on, as long as the shell lives, `number_of(shell, file)` tells the number of the cell that Python knows
    by the name `file`, None for no cell."""
    _numberings[shell] = number_of


def forget_cells(shell: object) -> None:
    """Undo `number_cells`."""
    _numberings.pop(shell, None)


def cell_name(number: int) -> str:
    """`cell [3]`: the number as notebooks show it."""
    return f"cell [{number}]"


def name_of(file: str) -> str:
    """What a reader calls the file that Python knows as `file`: a cell by its number, another by its own name.

    >>> name_of("<ipython-input-3-0a1b>"), name_of("/home/me/models/gpt.py")
    ('cell [3]', 'gpt.py')
    """
    found = (number_of(shell, file) for shell, number_of in reversed([*_numberings.items()]))
    number = next((each for each in found if each is not None), None) or number_in(file)
    if number is not None:
        return cell_name(number)
    if is_cell_file(file):
        return "a cell"
    return file if file.startswith("<") else Path(file).name


def place(file: str | None, line: int) -> str:
    """A line of the file that Python knows as `file`, in words; by its number alone where the file is not known.

    >>> place("/home/me/models/gpt.py", 12), place("<ipython-input-3-0a1b>", 4)
    ('gpt.py, line 12', 'cell [3], line 4')
    """
    return in_words(None if file is None else name_of(file), line)


def in_words(name: str | None, line: int) -> str:
    """A line of what a reader calls `name`; by its number alone of what was typed and has no name.

    >>> in_words("models/gpt.py", 12), in_words("<stdin>", 3)
    ('models/gpt.py, line 12', 'line 3')
    """
    return f"line {line}" if name is None or name.startswith("<") else f"{name}, line {line}"


def lines_in_words(file: str | None, lines: Sequence[int]) -> str:
    """Several lines of the file that Python knows as `file`, in words.

    >>> lines_in_words("/home/me/gpt.py", [3]), lines_in_words("/home/me/gpt.py", [3, 7])
    ('gpt.py, line 3', 'gpt.py, lines 3 and 7')
    """
    if len(lines) == 1:
        return place(file, lines[0])
    said = f"lines {', '.join(map(str, lines[:-1]))} and {lines[-1]}"
    name = None if file is None else name_of(file)
    return said if name is None or name.startswith("<") else f"{name}, {said}"


def place_called(file: str | None, line: int, called: str | None) -> str:
    """`place`, and behind it the line that led there, `FILE:LINE` by the file's name as Python knows it, where there is
    one.

    >>> place_called("/home/me/gpt.py", 12, "<ipython-input-3-0a1b>:4")
    'gpt.py, line 12, called at cell [3], line 4'
    """
    where = place(file, line)
    if called is None:
        return where
    name, _, number = called.rpartition(":")
    return f"{where}, called at {place(name, int(number))}"


def called_in_words(called: str) -> str:
    """`called at cell [7], line 12`, of the line that led to another as a report has it.

    >>> called_in_words("cell [7]:12"), called_in_words("train.py:31")
    ('called at cell [7], line 12', 'called at train.py, line 31')
    """
    name, _, line = called.rpartition(":")
    return f"called at {in_words(name, int(line))}"


def in_short(name: str | None, line: int) -> str:
    """The same for a table.

    >>> in_short("cell [3]", 4), in_short("models/gpt.py", 12), in_short("<stdin>", 3)
    ('[3]:4', 'models/gpt.py:12', '3')
    """
    return str(line) if name is None or name.startswith("<") else f"{name.removeprefix('cell ')}:{line}"
