"""Places in the user's code as readers know them: `cell [3], line 4` in words, `[3]:4` in tables."""

from collections.abc import Callable
from pathlib import Path

from .cell_files import is_cell_file, number_in

_numberings: list[Callable[[str], int | None]] = []  # of the shells that were loaded into, the newest last


def number_cells(number_of: Callable[[str], int | None]) -> None:
    """From now on `number_of` tells the number of the cell that Python knows by a file's name, None for no cell."""
    _numberings.append(number_of)


def forget_cells(number_of: Callable[[str], int | None]) -> None:
    """Undo `number_cells`."""
    _numberings.remove(number_of)


def cell_name(number: int) -> str:
    """`cell [3]`: the number as notebooks show it."""
    return f"cell [{number}]"


def name_of(file: str) -> str:
    """What a reader calls the file that Python knows as `file`: a cell by its number, another by its own name.

    >>> name_of("<ipython-input-3-0a1b>"), name_of("/home/me/models/gpt.py")
    ('cell [3]', 'gpt.py')
    """
    found = (number_of(file) for number_of in reversed(_numberings))
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


def in_short(name: str | None, line: int) -> str:
    """The same for a table.

    >>> in_short("cell [3]", 4), in_short("models/gpt.py", 12), in_short("<stdin>", 3)
    ('[3]:4', 'models/gpt.py:12', '3')
    """
    return str(line) if name is None or name.startswith("<") else f"{name.removeprefix('cell ')}:{line}"
