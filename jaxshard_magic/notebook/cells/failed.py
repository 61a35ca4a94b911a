"""Which cells raised, and where: what stands behind that line of theirs did not run."""

from typing import TYPE_CHECKING, Any

from .early import line_of

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
            at = None if error is None else line_of(self._shell, error.__traceback__)
            self.lines[number] = 0 if at is None else at[1]
