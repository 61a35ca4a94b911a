"""The end of a cell before its end: where it was, and one line for who stopped it."""

from types import TracebackType
from typing import TYPE_CHECKING

from ...cell_files import is_cell_file
from .code import number_of
from .lines import is_ours

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Interrupted(KeyboardInterrupt):
    """The user stopped the cell. IPython shows its one line, and cells that wait behind it do not run."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def line_of(shell: "InteractiveShell", traceback: TracebackType | None) -> tuple[str, int] | None:
    """The file and the line of the outermost frame that is a cell's; None for an error of no cell's."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_cell_file(file) or number_of(shell, file) is not None:
            return file, traceback.tb_lineno
        traceback = traceback.tb_next
    return None


def in_the_step(shell: "InteractiveShell", traceback: TracebackType | None) -> bool:
    """Whether the cell had called its sharded step when it ended."""
    while traceback is not None and line_of(shell, traceback.tb_next) is not None:
        traceback = traceback.tb_next
    while traceback is not None:
        if traceback.tb_next is not None and is_ours(traceback.tb_next):
            return True
        traceback = traceback.tb_next
    return False
