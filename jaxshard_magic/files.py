"""Files that are written whole or not at all, and those that nobody but their user reads or writes."""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

_OWN = stat.S_IRUSR | stat.S_IWUSR
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def put_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file so that no reader sees half of it, and what was there stays where that fails.

    `mode`: what may be done with a new file, less the process's umask; one that is there keeps its own. Raises OSError.
    """
    with new_file(path, mode) as file:
        file.write(data)


@contextmanager
def new_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file to write, which has its name once it is closed: as `put_whole`."""
    new = path.with_name(f".{uuid4().hex}.new")
    try:
        with open(new, "x+b", opener=partial(os.open, mode=mode)) as file:
            yield file
        if path.exists():
            shutil.copymode(path, new)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def put_own(path: Path, data: bytes) -> None:
    """As `put_whole`, for a file of its user's alone."""
    close_to_others(path)
    put_whole(path, data, _OWN)


def own_folder(path: Path) -> Path:
    """The folder, made where there is none; its user alone may enter it. Raises OSError where it can't be made."""
    path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    close_to_others(path)
    return path


def own_file(path: Path) -> Path:
    """The file, an empty one where there is none; its user alone may read it. Raises OSError where it can't be made."""
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, _OWN))
    close_to_others(path)
    return path


def close_to_others(path: Path) -> None:
    """Take from everybody else what they may do with a file or a folder, where it is there and ours to change. What
    its owner may not write either was laid open on purpose, and stays so."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OF_OTHERS and mode & stat.S_IWUSR:
            path.chmod(mode & ~_OF_OTHERS)
