"""Lines at which cells raised; the statements below did not run."""

from typing import TYPE_CHECKING, Any

from .interruption import failing_line

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class FailedCells:
    """Failed cells.

    Attributes:
        lines: By cell number, the line in Python's count at which the cell raised; 0 if nothing of the cell ran.
    """

    def __init__(self, shell: "InteractiveShell"):
        self._shell = shell
        self.lines: dict[int, int] = {}

    def note(self, result: Any) -> None:
        """Record a cell's result; IPython calls this at the end of each cell."""
        number, error = result.execution_count, result.error_in_exec
        if number is not None and not result.success:
            at = None if error is None else failing_line(self._shell, error.__traceback__)
            self.lines[number] = 0 if at is None else at[1]
