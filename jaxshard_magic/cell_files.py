"""File names of notebook cells in Python: by IPython in a terminal, ipykernel and Colab."""

import re

_CELL = re.compile(
    r"<ipython-input-(?P<terminal>\d+)-\w+>"
    r"|.*[/\\]ipykernel_\d+[/\\]\d+\.py"
    r"|.*[/\\]ipython-input-(?:(?P<colab>\d+)-)?\d+\.py"
)
# Regular expression for the part of a cell's file name with the number of a kernel or a cell. Without it, the same cell
# has the same name in every session.
OF_ONE_SESSION = r"(?<=/)ipykernel_\d+/|(?<=[</]ipython-input-)\d+-"


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
