"""Which cells raised, and where: what stands behind that line of theirs did not run."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

from ...cell_files import is_cell_file
from .code import name_of

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Failed:
    """`lines[n]` is the line, as Python counts them, at which the cell that ran as number n raised; 0 where none of it
    ran."""

    def __init__(self, shell: "InteractiveShell"):
        self._shell = shell
        self.lines: dict[int, int] = {}

    def note(self, result: Any) -> None:
        """IPython calls it when a cell has ended."""
        number, error = result.execution_count, result.error_in_exec
        if number is not None and not result.success:
            self.lines[number] = 0 if error is None else self._line(error.__traceback__)

    def _line(self, traceback: TracebackType | None) -> int:
        """The line of the outermost frame that is a cell's."""
        while traceback is not None:
            file = traceback.tb_frame.f_code.co_filename
            if is_cell_file(file) or name_of(self._shell, file):
                return traceback.tb_lineno
            traceback = traceback.tb_next
        return 0
