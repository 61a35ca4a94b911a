"""What Python calls the cells of a notebook, by IPython in a terminal, ipykernel and Colab."""

import re

_CELL = re.compile(
    r"<ipython-input-(?P<terminal>\d+)-\w+>"
    r"|.*[/\\]ipykernel_\d+[/\\]\d+\.py"
    r"|.*[/\\]ipython-input-(?:(?P<colab>\d+)-)?\d+\.py"
)
# What a kernel's number, or a cell's, puts into the name of a cell's file: without it, the same cell has the same name
# in every session. A regular expression.
OF_ONE_SESSION = r"(?<=/)ipykernel_\d+/|(?<=[</]ipython-input-)\d+-"


def is_cell_file(file: str) -> bool:
    """Is this the name of a cell's file?

    >>> is_cell_file("<ipython-input-3-0a1b>"), is_cell_file("/tmp/ipykernel_81/2938.py"), is_cell_file("/tmp/gpt.py")
    (True, True, False)
    """
    return _CELL.fullmatch(file) is not None


def number_in(file: str) -> int | None:
    """The number of the cell, where the name of its file tells it.

    >>> number_in("<ipython-input-3-0a1b>"), number_in("/tmp/ipython-input-4-2938.py"), number_in("/tmp/gpt.py")
    (3, 4, None)
    """
    found = _CELL.fullmatch(file)
    number = found and (found["terminal"] or found["colab"])
    return int(number) if number else None
