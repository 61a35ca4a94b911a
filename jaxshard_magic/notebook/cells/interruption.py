"""Early end of a cell: the failing line, and a one-line error for an interrupt."""

from types import TracebackType
from typing import TYPE_CHECKING

from ...cell_files import is_cell_file
from .cell_code import execution_number
from .user_tracebacks import is_ours

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Interrupted(KeyboardInterrupt):
    """Interrupt by the user, shown as one line; cells queued behind do not run."""

    # IPython calls this method in place of drawing a traceback.
    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def failing_line(shell: "InteractiveShell", traceback: TracebackType | None) -> tuple[str, int] | None:
    """Return the file and line of the outermost frame in a cell; None if no cell is in the traceback."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_cell_file(file) or execution_number(shell, file) is not None:
            return file, traceback.tb_lineno
        traceback = traceback.tb_next
    return None


def has_called_step(shell: "InteractiveShell", traceback: TracebackType | None) -> bool:
    """Return whether the cell was inside a call of the sharded step when it ended."""
    while traceback is not None and failing_line(shell, traceback.tb_next) is not None:
        traceback = traceback.tb_next
    while traceback is not None:
        if traceback.tb_next is not None and is_ours(traceback.tb_next):
            return True
        traceback = traceback.tb_next
    return False
