"""A traceback as the user's own cell would give it."""

import sysconfig
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])
_OF_CALLBACKS = str(Path(_PACKAGE) / "program" / "callbacks.py")  # raises what functions of the user's raised
_DRAW = "_render_traceback_"  # what IPython calls, where an error has it
_NOT_THE_USERS = (_PACKAGE, sysconfig.get_path("stdlib"))


def own_lines(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """`traceback` without our frames. Those below the user's last line stay where we raised it ourselves, so that it
    can be found."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    last = max((at for at, frame in enumerate(frames) if _is_users(frame)), default=-1)
    kept, raised_here = None, bool(frames) and is_ours(frames[-1]) and _file(frames[-1]) != _OF_CALLBACKS
    for at, frame in reversed(list(enumerate(frames))):
        if (raised_here and at > last) or not is_ours(frame):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


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
    """Undo `drawn_alone` and `drawn_as_line`."""
    getattr(error, "__dict__", {}).pop(_DRAW, None)


def is_ours(traceback: types.TracebackType) -> bool:
    """Is this a frame of the package?"""
    return _file(traceback).startswith(_PACKAGE)


def _file(traceback: types.TracebackType) -> str:
    return traceback.tb_frame.f_code.co_filename


def _is_users(traceback: types.TracebackType) -> bool:
    file = _file(traceback)
    return not file.startswith(_NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(
        Path(file).parts
    )
