"""Atomic writes of files, and files private to a user."""

import errno
import os
import stat
import zlib
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from .temporary import TemporaryChange

_OWN = stat.S_IRUSR | stat.S_IWUSR
_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_LINKS = 40  # length of a chain of links; Linux follows no more


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically: readers never see half of it, and a failure leaves the old file.

    Args:
        path: The file.
        data: New content.
        mode: Mode of a new file, less the process's umask. An existing file keeps its mode.

    Raises:
        OSError: The file can't be written.
    """
    with AtomicFile(path, mode) as new:
        new.file.write(data)
        new.commit()


class AtomicFile(TemporaryChange):
    """File that replaces the file at a path on `commit`, and is removed otherwise. Methods raise OSError.

    Args:
        path: Path of the file to replace.
        mode: Mode of a new file, less the process's umask.

    Attributes:
        file: The open file, for writing and reading.
    """

    file: BinaryIO

    def __init__(self, path: Path, mode: int = 0o666):
        self._path, self._mode = path, mode
        # In the same folder: `os.replace` is atomic only within one file system.
        self._new = path.with_name(f".{uuid4().hex}.new")

    def apply(self) -> None:
        self.file = open(self._new, "x+b", opener=partial(os.open, mode=self._mode))  # noqa: SIM115

    def commit(self) -> None:
        """Close the file, give it the mode of the old file, and move it to the path."""
        # Closed first: Windows does not move an open file.
        self.file.close()
        with suppress(FileNotFoundError):
            self._new.chmod(stat.S_IMODE(self._path.stat().st_mode))
        os.replace(self._new, self._path)

    def revert(self) -> None:
        if hasattr(self, "file"):
            self.file.close()
        self._new.unlink(missing_ok=True)


def read_limited(path: Path, most: int) -> bytes:
    """Return the content of a file.

    Args:
        path: The file.
        most: Highest number of bytes.

    Raises:
        OSError: The file is larger, or a pipe or a device, which may have no end.
    """
    # Non-blocking: opening a pipe would wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file")
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def inflated(packed: bytes, most: int) -> bytes:
    """Return data compressed by `zlib.compress`.

    Args:
        packed: Compressed data.
        most: Highest number of bytes.

    Raises:
        ValueError: The data is larger, cut off, or not compressed by zlib.
    """
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, most)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not unpacking.eof:
        raise ValueError(f"it is cut off, or inflates to more than {most:,} bytes")
    return data


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically, readable and writable for the user alone. Raises OSError.

    Args:
        path: The file.
        data: New content.
    """
    # First, since the new file takes the mode of the old one.
    make_private(path)
    write_atomic(path, data, _OWN)


def private_folder(path: Path) -> Path:
    """Return the folder, created if missing; only the user may enter. Raises OSError where it can't be created."""
    path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    make_private(path)
    return path


def private_file(path: Path) -> Path:
    """Return the file, created empty if missing; only the user may read it.

    Raises:
        OSError: The file can't be created, or the path goes through another user's link.
    """
    if _is_of_others(path):
        raise PermissionError(errno.EPERM, "it is a link that another user has made")
    if not path.exists():
        # Created with the final mode: before a later chmod others could open the file.
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, _OWN))
    make_private(path)
    return path


def make_private(path: Path) -> None:
    """Remove other users' permissions on a file or folder, as far as it exists and belongs to this user.

    Applies to the target of a link by this user, not to that of another user's link. A file that its owner may not
    write was opened to others on purpose, and stays as it is.
    """
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        if _is_of_others(path):
            return
        found = path.stat()
        mode = stat.S_IMODE(found.st_mode)
        if mode & _OF_OTHERS and mode & stat.S_IWUSR and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
            path.chmod(mode & ~_OF_OTHERS)


def _is_of_others(path: Path) -> bool:
    """Return whether a path goes through another user's link. Its maker chooses the target."""
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
