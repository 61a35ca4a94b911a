"""A traceback as the user's own cell would give it."""

import inspect
import sysconfig
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import without_our_frames

_PACKAGE = str(Path(__file__).parents[2])
_DRAW = "_render_traceback_"  # what IPython calls, where an error has it
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NOT_THE_USERS = (_PACKAGE, sysconfig.get_path("stdlib"))


def own_lines(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """`traceback` without our frames. Those below the user's last line stay where we raised it ourselves, so that it
    can be found."""
    return without_our_frames(traceback, _is_our_file, _is_users_file)


def drawn_alone(shell: Any, error: BaseException) -> None:
    """Have IPython draw the traceback that `error` has now, and not the line above it that called the magic. It is to
    be `let_go` once that is drawn: an error that holds itself keeps the arrays of its frames alive."""
    traceback, drawn = error.__traceback__, shell.InteractiveTB.structured_traceback
    if traceback is None or hasattr(error, _DRAW):
        return
    with suppress(AttributeError, TypeError):  # of a class that lets nothing be set: drawn as it is
        setattr(error, _DRAW, lambda: drawn(type(error), error, traceback, tb_offset=0))


def drawn_as_line(error: BaseException) -> None:
    """Have IPython draw `error` as one line, without a traceback. It is to be `let_go` as well."""
    with suppress(AttributeError, TypeError):
        setattr(error, _DRAW, lambda: [f"{type(error).__name__}: {error}"])


def let_go(error: BaseException) -> None:
    """Undo `drawn_alone` and `drawn_as_line`, and have our functions, and those of libraries that they called, hold
    nothing any more: Python and IPython keep the last error, which would keep a step's arguments on the devices."""
    for each in _chain(error):
        getattr(each, "__dict__", {}).pop(_DRAW, None)
        in_ours = False
        for frame in _frames(each.__traceback__):
            in_ours |= _is_ours(frame)
            waits = frame.f_code.co_flags & _SUSPENDED  # maybe, and clearing it would end it
            if in_ours and not waits and not _is_users(frame):
                with suppress(RuntimeError):  # it runs still
                    frame.clear()
                    _ = frame.f_locals  # renewed: up to Python 3.12 a copy, which IPython has had made


def _frames(traceback: types.TracebackType | None) -> list[types.FrameType]:
    """The functions of a traceback, the outermost first, and those that called them: `own_lines` leaves some out, which
    the others keep alive."""
    found: dict[types.FrameType, None] = {}
    while traceback is not None:
        frame: types.FrameType | None = traceback.tb_frame
        callers: list[types.FrameType] = []
        while frame is not None and frame not in found:
            callers.append(frame)
            frame = frame.f_back
        found |= dict.fromkeys(reversed(callers))
        traceback = traceback.tb_next
    return [*found]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, those that it was raised from or while they were handled, and those of a group, each once."""
    todo, seen = [error], set[int]()
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            inner = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            todo += [other for other in (each.__cause__, each.__context__, *inner) if other is not None]


def is_ours(traceback: types.TracebackType) -> bool:
    """Is this a frame of the package?"""
    return _is_ours(traceback.tb_frame)


def _is_ours(frame: types.FrameType) -> bool:
    return _is_our_file(frame.f_code.co_filename)


def _is_users(frame: types.FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


def _is_our_file(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_users_file(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(
        Path(file).parts
    )
