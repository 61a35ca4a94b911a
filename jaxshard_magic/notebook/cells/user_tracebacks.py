"""Reduce tracebacks to the user's frames."""

import inspect
import sysconfig
import types
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...errors import without_our_frames

_PACKAGE = str(Path(__file__).parents[2])
_DRAW = "_render_traceback_"  # method of an exception that IPython calls to draw it
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_NOT_THE_USERS = (_PACKAGE, sysconfig.get_path("stdlib"))


def user_traceback(traceback: types.TracebackType | None) -> types.TracebackType | None:
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


def _frames(traceback: types.TracebackType | None) -> list[types.FrameType]:
    """Return the frames of a traceback, outermost first, with their callers."""
    found: dict[types.FrameType, None] = {}
    while traceback is not None:
        frame: types.FrameType | None = traceback.tb_frame
        callers: list[types.FrameType] = []
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


def is_ours(traceback: types.TracebackType) -> bool:
    """Return whether the first frame of a traceback belongs to this package."""
    return _is_ours(traceback.tb_frame)


def _is_ours(frame: types.FrameType) -> bool:
    return _is_our_file(frame.f_code.co_filename)


def _is_users(frame: types.FrameType) -> bool:
    return _is_users_file(frame.f_code.co_filename)


def _is_our_file(file: str) -> bool:
    return file.startswith(_PACKAGE)


def _is_users_file(file: str) -> bool:
    return not file.startswith(_NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(Path(file).parts)
