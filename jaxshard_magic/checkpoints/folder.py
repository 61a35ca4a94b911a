"""A folder of checkpoints on a disk that all hosts share: creation, a lock for one writer, and file system errors.

An error of one host is raised on every host (`run_on_first_host`, `run_on_all_hosts`).
"""

import errno
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import jax

from ..coordination import ProcessFailed, SharedCalls, gather_texts, is_multiprocess, run_on_first
from ..errors import ShardError, did_you_mean, printable
from ..temporary import UndoUnlessFinished

LOCK = ".jaxshard-saving"
META = "meta"  # subfolder of a checkpoint with its description
# After the number in the name of a folder: an unfinished save (Orbax's mark), and a checkpoint that is being removed.
UNFINISHED_MARK, REMOVED = (".orbax-checkpoint-tmp", ".removed")
# Operating systems differ in the error for a lock that another process has.
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_UNSEEN = "unseen"
_ROOM = 1 << 14  # bytes that must fit on the disk
_LOCKED = 1 << 20  # offset: on Windows no other process can read a locked byte, and the owner's name comes before it
T = TypeVar("T")


class FolderLock:
    """Lock file of the process that saves into a folder; the system releases the lock when the process ends.

    Args:
        folder: Existing folder for the lock file.

    Attributes:
        is_locked: Whether this object has the lock.
    """

    def __init__(self, folder: Path):
        self._path, self.is_locked = folder / LOCK, False
        self._file: Any = None  # closed, and thereby unlocked, at the latest when this object is garbage

    def acquire(self) -> None:
        """Acquire the lock. Raises ShardError if another process has it, or the folder can't be written."""
        if self.is_locked:
            return
        try:
            if self._file is None:
                self._file = open(self._path, "r+b", buffering=0, opener=_opened)  # noqa: SIM115
            _lock(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from None
        self.is_locked = True
        with suppress(OSError):  # a full disk; the text is only for messages
            self._file.truncate(0)
            self._file.seek(0)
            self._file.write(_this_process().encode())

    def release(self) -> None:
        """Release the lock and close the file."""
        if self.is_locked:
            # Closing the file is not enough: a forked process has it open, too.
            _unlock(self._file.fileno())
            self.is_locked = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refusal(self, error: OSError) -> ShardError:
        """Return the error for a lock that can't be acquired, naming the process that has it."""
        folder, who = self._path.parent, ""
        if self._file is None or error.errno not in _TAKEN:
            return filesystem_error(folder, "write into", error)
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
    """Open a file without following a symbolic link."""
    # In a shared folder, another user may have put a link there.
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _lock(file: int) -> None:
    """Lock an open file until it is closed. Raises OSError if another process has it locked."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _LOCKED, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _unlock(file: int) -> None:
    """Unlock a file that `_lock` has locked."""
    # Windows may take its time to release the lock of a file that is merely closed.
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, _LOCKED, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)


def make_folder(folder: Path) -> Path:
    """Create a folder for checkpoints if it is missing, and return it.

    Raises:
        ShardError: The folder can't be created, is a file, or has nothing but other things in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [each.name for each in folder.iterdir()]
    except FileExistsError:
        raise ShardError(f"{folder} is a file; checkpoints go into a folder: name another") from None
    except OSError as error:
        raise filesystem_error(folder, "write into", error) from None
    if names and not any(_ours(folder, name) for name in names):
        raise ShardError(
            f"{folder} is there already and has other things in it, such as {min(names)}; name a new folder for "
            "checkpoints"
        )
    return folder


def _ours(folder: Path, name: str) -> bool:
    """Return whether an entry of the folder is a checkpoint, an unfinished or removed one, or the lock."""
    return name == LOCK or UNFINISHED_MARK in name or name.endswith(REMOVED) or is_complete(folder / name)


def is_complete(path: Path) -> bool:
    """Return whether a path is a complete checkpoint: a folder with a number for a name and metadata inside."""
    return is_number(path.name) and (path / META).is_dir()


def is_number(name: str) -> bool:
    """Return whether a name is a number in the form of checkpoints: ASCII digits, at most 20, without leading zeros."""
    return name.isascii() and name.isdecimal() and str(int(name[:20])) == name


def check_writable(folder: Path) -> None:
    """Raise ShardError if a file of 16 KiB can't be written into a folder."""
    name = folder / f".{uuid4().hex}.sign"
    try:
        with UndoUnlessFinished(lambda: name.unlink(missing_ok=True)):
            name.write_bytes(bytes(_ROOM))
    except OSError as error:
        raise filesystem_error(folder, "write into", error) from None


def suggest_name(path: Path, is_one: Callable[[Path], bool]) -> str:
    """Return a suggestion, as ` Did you mean 'ckpt'?`, or "".

    Args:
        path: Path that does not exist.
        is_one: Predicate for the entries beside it that may be suggested.
    """
    try:
        names = [each.name for each in path.parent.iterdir() if each != path and is_one(each)]
    except OSError:  # the parent folder is missing or unreadable
        return ""
    return did_you_mean(path.name, sorted(names))


def check_shared_by_hosts(folder: Path) -> None:
    """Raise ShardError, the same on all hosts, unless each host sees and can write host 0's folder.

    Host 0 creates a file; each other host looks for it and creates one of its own. Every host must call this; with one
    process nothing happens.
    """
    if not is_multiprocess():
        return
    sign = folder / run_on_first_host(lambda: _create_probe_file(folder))
    seen = gather_texts(_probe_error(sign))
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


def _create_probe_file(folder: Path) -> str:
    """Create a file with a new name in a folder and return the name."""
    # A host may cache that a name is missing, so no host may have looked for this name before.
    name = f".{uuid4().hex}.sign"
    try:
        (folder / name).touch()
    except OSError as error:
        raise filesystem_error(folder, "write into", error) from None
    return name


def _probe_error(sign: Path) -> str:
    """Return the reason why this host can't save beside host 0's file; "" for none."""
    if not os.path.exists(sign):
        return _UNSEEN
    own = sign.with_name(f"{sign.name}.{jax.process_index()}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return str(filesystem_error(sign.parent, "write into", error))
    return ""


def filesystem_error(folder: Path, doing: str, error: BaseException) -> ShardError:
    """Return a ShardError that explains a file system error in one line, with a remedy.

    Args:
        folder: Path for the message.
        doing: Verb for the message, such as "write into".
        error: Exception. Its errno, or that of its causes, decides, and known phrases of its text.
    """
    number, text = _number_of(error), str(error)
    if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text:
        return ShardError(
            f"can't {doing} {folder}: too many files are open: close some, or raise the limit (ulimit -n)"
        )
    if number == errno.ENOSPC or "No space left" in text or "RESOURCE_EXHAUSTED" in text:
        return ShardError(f"there is no room left to {doing} {folder}: free some, keep fewer, or name another disk")
    if number in (errno.EROFS, errno.EACCES, errno.EPERM) or "Permission denied" in text:
        return ShardError(f"this user may not {doing} {folder}: name a folder that can be written, or change its mode")
    if number == errno.ENOTDIR:
        return ShardError(f"can't {doing} {folder}: a part of its path is a file; name another folder")
    return ShardError(f"can't {doing} {folder}: {first_line(error)}; name another folder, or mend this one")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type; at most 200 characters."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(None, lines), type(error).__name__)[:200]


def _number_of(error: BaseException | None) -> int | None:
    """Return the errno of an error, or of the first one with an errno among its causes; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def run_on_first_host(make: Callable[[], str]) -> str:
    """Return `make()` of host 0 on all hosts.

    Args:
        make: Runs on host 0 alone.

    Raises:
        ShardError: On all hosts, if `make` raises one on host 0.
    """
    try:
        return run_on_first(make)
    except ProcessFailed as failed:
        raise ShardError(str(failed)) from None


def run_on_all_hosts(make: Callable[[], T]) -> T:
    """Return this host's `make()` once it has succeeded on all hosts.

    Args:
        make: Runs on each host.

    Raises:
        ShardError: On all hosts, if `make` raises one on some host. The text is the first failed host's, after its
            number unless all hosts failed with the same text.
    """
    results: list[T] = []
    errors: list[ShardError] = []

    def attempt() -> str:
        try:
            results.append(make())
        except ShardError as error:
            errors.append(error)
        return "".join(map(str, errors))

    with SharedCalls() as all_of:
        messages = all_of(attempt)
    # The original error keeps its cause and its `fix`; the gathered text has neither.
    if len(messages) == 1 and errors:
        raise errors[0]
    host = next((i for i, line in enumerate(messages) if line), None)
    if host is not None:
        raise ShardError(messages[host] if len(set(messages)) == 1 else f"host {host}: {messages[host]}")
    return results[0]
