"""Errors of cells: the user's frames of a traceback, the line that failed, and an interrupt as one line."""

import inspect
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from ...code_locations import is_cell_file
from ...errors import without_our_frames
from .cell_code import execution_number

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_PACKAGE = str(Path(__file__).parents[2])
_DRAW = "_render_traceback_"  # method of an exception that IPython calls to draw it
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NOT_THE_USERS = (_PACKAGE, sysconfig.get_path("stdlib"))


def user_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Return `traceback` without frames of this package.

    If the package itself raised, the frames below the user's last line stay, for debugging.
    """
    return without_our_frames(traceback, _is_our_file, _is_users_file)


def show_without_magic_line(shell: Any, error: BaseException) -> None:
    """Make IPython draw the error's present traceback, without the frame above that called the magic.

    Call `release_frames` once the traceback is drawn.
    """
    traceback, drawn = error.__traceback__, shell.InteractiveTB.structured_traceback
    if traceback is None or hasattr(error, _DRAW):
        return
    with suppress(AttributeError, TypeError):  # an exception that takes no attributes is drawn with the frame
        # The error now refers to itself, which keeps the arrays of its frames alive until `release_frames`.
        setattr(error, _DRAW, lambda: drawn(type(error), error, traceback, tb_offset=0))


def show_as_one_line(error: BaseException) -> None:
    """Make IPython draw `error` as one line without traceback. Call `release_frames` afterwards."""
    with suppress(AttributeError, TypeError):
        setattr(error, _DRAW, lambda: [f"{type(error).__name__}: {error}"])


def release_frames(error: BaseException) -> None:
    """Undo `show_without_magic_line` and `show_as_one_line`, and clear the frames of this package and of libraries
    called by it."""
    # Python and IPython keep the last error, and its frames would keep the step's arguments on the devices.
    for each in _chain(error):
        getattr(each, "__dict__", {}).pop(_DRAW, None)
        in_ours = False
        for frame in _frames(each.__traceback__):
            in_ours |= _is_ours(frame)
            waits = frame.f_code.co_flags & _SUSPENDED  # clearing a suspended frame would end its generator
            if in_ours and not waits and not _is_users(frame):
                with suppress(RuntimeError):  # a running frame
                    frame.clear()
                    # Up to Python 3.12 this is a copy, made when IPython read it; reading renews the copy.
                    _ = frame.f_locals


def _frames(traceback: TracebackType | None) -> list[FrameType]:
    """Return the frames of a traceback, outermost first, with their callers."""
    found: dict[FrameType, None] = {}
    while traceback is not None:
        frame: FrameType | None = traceback.tb_frame
        callers: list[FrameType] = []
        # Callers left out by `user_traceback` are kept alive by the frames that remain.
        while frame is not None and frame not in found:
            callers.append(frame)
            frame = frame.f_back
        found |= dict.fromkeys(reversed(callers))
        traceback = traceback.tb_next
    return [*found]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and contexts, and the members of groups, each once."""
    todo, seen = [error], set[int]()
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            todo += [other for other in (each.__cause__, each.__context__, *inner) if other is not None]


def is_ours(traceback: TracebackType) -> bool:
    """Return whether the first frame of a traceback belongs to this package."""
    return _is_ours(traceback.tb_frame)


def _is_ours(frame: FrameType) -> bool:
    return _is_our_file(frame.f_code.co_filename)


def _is_users(frame: FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


def _is_our_file(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_users_file(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)


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
