"""A folder of checkpoints: made, written by one process at a time, on a disk that all hosts share; what goes wrong."""

import errno
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax

from ..coordination import gathered, is_there
from ..errors import ShardError, did_you_mean, printable
from ..temporary import Unfinished
from .agreed import on_first

LOCK = ".jaxshard-saving"
META = "meta"  # what tells of a checkpoint, in its folder
TORN, REMOVED = (
    ".orbax-checkpoint-tmp",
    ".removed",
)  # behind the number of one that was cut off, or is being removed
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_UNSEEN = "unseen"
_ROOM = 1 << 14  # bytes that there has to be room for
_LOCKED = 1 << 20  # the byte that Windows locks: no other process can read it, and who it is stands before it


class Lock:
    """Who saves into a folder: held by one process at a time, and let go of by the system when that ends."""

    def __init__(self, folder: Path):
        self._path, self.held = folder / LOCK, False
        self._file: Any = None  # which is closed when this is garbage

    def take(self) -> None:
        """Hold it from here on. Raises ShardError where another one does, or the folder can't be written."""
        if self.held:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "r+b", buffering=0, opener=_opened)  # noqa: SIM115
            _lock(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from None
        self.held = True
        with suppress(OSError):  # of a full disk; the name is for a message alone
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(_this_process().encode())

    def release(self) -> None:
        """Let others save."""
        if self.held:
            _unlock(self._file.fileno())  # a process that was forked from this one has the file open, too
            self.held = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refusal(self, error: OSError) -> ShardError:
        folder, who = self._path.parent, ""
        if self._file is None or error.errno not in _TAKEN:
            return told_of(folder, "write into", error)
        with suppress(OSError):
            who = printable(self._file.read(100).decode(errors="replace"))
        self.release()
        if who == _this_process():
            return ShardError(
                f"{folder}: this process saves checkpoints into it already, in another thread or by another copy of "
                "the package; name another folder"
            )
        return ShardError(
            f"{folder}: {who or 'another process'} is saving checkpoints into it; name another folder, or end that one"
        )


def _opened(path: str, flags: int) -> int:
    """Never what a link points to, which another user may have put there."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _lock(file: int) -> None:
    """Hold an open file until it is closed. Raises OSError where another process does."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _LOCKED, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(file: int) -> None:
    """Let go of a file that `_lock` holds; Windows may take its time where it is only closed."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _LOCKED, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def made(folder: Path) -> Path:
    """The folder, made where there is none. Raises ShardError where it can't be, for a file, and for a folder with
    other things in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [each.name for each in folder.iterdir()]
    except FileExistsError:
        raise ShardError(f"{folder} is a file; checkpoints go into a folder: name another") from None
    except OSError as error:
        raise told_of(folder, "write into", error) from None
    if names and not any(_ours(folder, name) for name in names):
        raise ShardError(
            f"{folder} is there already and has other things in it, such as {min(names)}; name a new folder for "
            "checkpoints"
        )
    return folder


def _ours(folder: Path, name: str) -> bool:
    return name == LOCK or TORN in name or name.endswith(REMOVED) or is_whole(folder / name)


def is_whole(path: Path) -> bool:
    """Whether this is a checkpoint: a folder with a number for its name, which tells what is in it."""
    return is_number(path.name) and (path / META).is_dir()


def is_number(name: str) -> bool:
    """Whether a name is a number as a checkpoint has it."""
    return name.isascii() and name.isdecimal() and str(int(name[:20])) == name


def check_writable(folder: Path) -> None:
    """Raise ShardError where no file can be made in a folder, or there is no room for one."""
    name = folder / f".{uuid4().hex}.sign"
    try:
        with Unfinished(lambda: name.unlink(missing_ok=True)):
            name.write_bytes(bytes(_ROOM))
    except OSError as error:
        raise told_of(folder, "write into", error) from None


def nearest_to(path: Path, is_one: Callable[[Path], bool]) -> str:
    """` Did you mean 'ckpt'?` for what lies beside a path, is such a one and is named most like it; else nothing."""
    try:
        names = [each.name for each in path.parent.iterdir() if each != path and is_one(each)]
    except OSError:  # there is nothing, or nothing to be seen
        return ""
    return did_you_mean(path.name, sorted(names))


def shared_by_hosts(folder: Path) -> None:
    """Raise ShardError, the same on all hosts, where one of them doesn't see what the first writes into the folder, or
    can't write into it."""
    if not is_there():
        return
    sign = folder / on_first(lambda: _signed(folder))
    seen = gathered(_tried(sign))
    if jax.process_index() == 0:
        sign.unlink(missing_ok=True)
    host = next((i for i, line in enumerate(seen) if line), None)
    if host is None:
        return
    if seen[host] == _UNSEEN:
        raise ShardError(
            f"host {host} doesn't see what host 0 writes into {folder}: name a folder on a disk that all hosts share"
        )
    raise ShardError(f"host {host}: {seen[host]}")


def _signed(folder: Path) -> str:
    """The name of a new file there: nobody has looked for it, so that no host remembers that it is not there."""
    name = f".{uuid4().hex}.sign"
    try:
        (folder / name).touch()
    except OSError as error:
        raise told_of(folder, "write into", error) from None
    return name


def _tried(sign: Path) -> str:
    """What keeps this host from saving beside a sign of the first one; "" for nothing."""
    if not os.path.exists(sign):
        return _UNSEEN
    own = sign.with_name(f"{sign.name}.{jax.process_index()}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return str(told_of(sign.parent, "write into", error))
    return ""


def told_of(folder: Path, doing: str, error: BaseException) -> ShardError:
    """What an error of the file system means, in one line."""
    number, text = _number_of(error), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return ShardError(
            f"can't {doing} {folder}: too many files are open: close some, or raise the limit (ulimit -n)"
        )
    if number == errno.ENOSPC or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return ShardError(
            f"there is no room left to {doing} {folder}: free some, keep fewer, or name another disk"
        )
    if number in (errno.EROFS, errno.EACCES, errno.EPERM) or "Permission denied" in text:
        return ShardError(
            f"this user may not {doing} {folder}: name a folder that can be written, or change its mode"
        )
    if number == errno.ENOTDIR:
        return ShardError(f"can't {doing} {folder}: a part of its path is a file; name another folder")
    return ShardError(f"can't {doing} {folder}: {first_line(error)}; name another folder, or mend this one")


def first_line(error: BaseException) -> str:
    """The first line of what an error says, its type where it says nothing; 200 characters at most."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def _number_of(error: BaseException | None) -> int | None:
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None
