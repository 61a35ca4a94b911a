"""A traceback as the user's own cell would give it."""

import sysconfig
import types
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[2])
_NOT_THE_USERS = (_PACKAGE, sysconfig.get_path("stdlib"))


def own_lines(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """`traceback` without our frames, down to the user's last line; what lies below it stays, to be found."""
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    last = max((at for at, frame in enumerate(frames) if _is_users(frame)), default=-1)
    kept = None
    for at, frame in reversed(list(enumerate(frames))):
        if at > last or not _file(frame).startswith(_PACKAGE):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept


def _file(traceback: types.TracebackType) -> str:
    return traceback.tb_frame.f_code.co_filename


def _is_users(traceback: types.TracebackType) -> bool:
    file = _file(traceback)
    return not file.startswith(_NOT_THE_USERS) and not {"site-packages", "dist-packages"} & set(
        Path(file).parts
    )
