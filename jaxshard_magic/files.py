"""Files that are written whole or not at all, and those that nobody but their user reads or writes."""

import errno
import os
import stat
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from .temporary import Temporary

_OWN = stat.S_IRUSR | stat.S_IWUSR
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LINKS = 40  # one after the other, of which Linux follows no more


def put_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file so that no reader sees half of it, and what was there stays where that fails.

    `mode`: what may be done with a new file, less the process's umask; one that is there keeps its own. Raises OSError.
    """
    with NewFile(path, mode) as new:
        new.file.write(data)
        new.put()


class NewFile(Temporary):
    """A `file` to write, which takes the place of what is at a path when it is `put` there; else it is removed at the
    end. Its methods raise OSError."""

    file: BinaryIO

    def __init__(self, path: Path, mode: int = 0o666):
        self._path, self._mode = path, mode
        self._new = path.with_name(f".{uuid4().hex}.new")

    def begin(self) -> None:
        self.file = open(self._new, "x+b", opener=partial(os.open, mode=self._mode))  # noqa: SIM115

    def put(self) -> None:
        """It is written: close it, give it the mode of what is there, and the name."""
        self.file.close()
        with suppress(FileNotFoundError):
            self._new.chmod(stat.S_IMODE(self._path.stat().st_mode))
        os.replace(self._new, self._path)

    def end(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
        self._new.unlink(missing_ok=True)


def content(path: Path, most: int) -> bytes:
    """What is in a file of at most so many bytes. Raises OSError for a larger one, and for a pipe or a device, which
    may have no end."""
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    )  # a pipe waits for its writer
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def inflated(packed: bytes, most: int) -> bytes:
    """What `zlib.compress` was given, of at most so many bytes. Raises ValueError for more, and for other bytes."""
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or inflates to more than {most:,} bytes")
    return data


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
    """The file, an empty one where there is none; its user alone may read it. Raises OSError where it can't be made,
    and for a link of another user's."""
    if _is_of_others(path):
        raise PermissionError(errno.EPERM, "it is a link that another user has made")
    if not path.exists():
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, _OWN))
    close_to_others(path)
    return path


def close_to_others(path: Path) -> None:
    """Take from everybody else what they may do with a file or a folder, where it is there and ours to change, as what
    a link of our own points to is. What its owner may not write either was laid open on purpose, and stays so."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        if _is_of_others(path):
            return
        found = path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if (
            mode & _OF_OTHERS
            and mode & stat.S_IWUSR
            and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))
        ):
            path.chmod(mode & ~_OF_OTHERS)


def _is_of_others(path: Path) -> bool:
    """Whether a path goes over a link that another user has made, who chooses what it points to."""
    for _ in range(_LINKS):
        try:
            found = path.lstat()
        except OSError:
            return False
        if not stat.S_ISLNK(found.st_mode):
            return False
        if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
            return True
        path = path.parent / os.readlink(path)
    return True
