"""SQLite file of the history: creation, migration, one connection per job, and recovery from damage.

No process sees a half-made database: a new one is written to another file and renamed. A damaged one is moved aside by
one process alone. Both happen under a lock: a transaction on an empty database of its own, released with the end of its
process.
"""

import os
import sqlite3
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from glob import escape
from pathlib import Path
from typing import TypeVar

import psutil

from ..errors import ShardError
from ..files import make_private, private_file
from ..packages import upgrade_command
from ..temporary import OpenResource

APPLICATION = 0x6A736D31  # in the header of the file: marks a SQLite file as a history
SIDECARS = ("-wal", "-shm", "-journal")  # next to an open database, and left behind by a killed process

# SQL that migrates to each version of the database from the one before.
VERSIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE report (
            id INTEGER PRIMARY KEY AUTOINCREMENT, writer TEXT NOT NULL, size INTEGER NOT NULL, at REAL NOT NULL,
            notebook TEXT, name TEXT NOT NULL, strategy TEXT NOT NULL, mesh TEXT NOT NULL, options TEXT NOT NULL,
            typed TEXT NOT NULL, device TEXT NOT NULL, source TEXT NOT NULL, step_s REAL, predicted_s REAL, "on" TEXT,
            peak INTEGER, "limit" INTEGER, fits INTEGER, sent INTEGER, passed INTEGER, versions TEXT NOT NULL,
            has_cell INTEGER NOT NULL)""",
        """CREATE TABLE content (
            id INTEGER PRIMARY KEY REFERENCES report ON DELETE CASCADE,
            searched TEXT NOT NULL, cell BLOB, report BLOB NOT NULL)""",
        "CREATE INDEX report_at ON report (at)",
        "CREATE INDEX report_name ON report (name)",
        "CREATE INDEX report_strategy ON report (strategy)",
        "CREATE INDEX report_size ON report (size)",
    ),
)

# Local file systems. A write-ahead log has its index in shared memory, which machines with a network file system don't
# share: there it may corrupt the database.
_LOCAL = {"apfs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "ntfs", "overlay", "refs", "tmpfs", "xfs", "zfs"}

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_CLOSED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]


class HistoryError(ShardError):
    """The history can't be read or written. The message gives reason and remedy; the contents are unchanged."""


@dataclass(frozen=True)
class Database:
    """SQLite file of the history.

    Attributes:
        path: Path of the file.
        wait: Seconds to wait for a lock of another process.
        tell: Called with a line about a damaged file.
        own_folder: Whether the folder has nothing but the history; its permissions are then closed to other users too.
    """

    path: Path
    wait: float
    tell: Callable[[str], object] = warnings.warn
    own_folder: bool = False

    def read(self, job: "Job[T]", default: T) -> T:
        """Run a job that reads.

        Args:
            job: Called with the connection.
            default: Result without a database.

        Raises:
            HistoryError: The file can't be read.
        """
        return self._recover(lambda: self._read(job) if _has_content(self.path) else default)

    def write(self, job: "Job[T]") -> T:
        """Run a job in a transaction of its own, in a new database if there is none.

        Args:
            job: Called with the connection.

        Raises:
            HistoryError: The file can't be written.
        """
        return self._recover(lambda: self._write(job))

    def _recover(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, once more after moving a damaged database aside."""
        if self.path.is_dir():
            file = self.path / "history.sqlite3"
            raise HistoryError(f"the history {self.path} is a folder: set JAXSHARD_HISTORY to a file in it, {file}")
        # A pipe or device has no content, so a new database would be renamed over it.
        if self.path.exists() and not self.path.is_file():
            raise self._history_error("is a pipe or a device", "%config ShardSession.remember = False keeps no history")
        try:
            found = _identity(self.path)
            try:
                return attempt()
            except sqlite3.DatabaseError as error:
                if _code(error) in _DAMAGED:
                    self._set_aside(found)
                # The file is gone: another process has moved the damaged one aside, so the attempt is repeated.
                elif found is None or _has_content(self.path):
                    raise
            return attempt()
        except (sqlite3.DatabaseError, OSError) as error:
            raise self._history_error(*self._describe_error(error)) from error

    def _read(self, job: "Job[T]") -> T:
        """Run a reading job; a database in a read-only folder is opened as immutable."""
        try:
            with OpenResource(self._open) as opened:
                if self._version(opened.resource) < len(VERSIONS):
                    self._in_transaction(opened.resource, lambda _: None)
                return _tolerant(job, opened.resource)
        except sqlite3.OperationalError as error:
            # An immutable database is read without its write-ahead log, so changes in a log would be missing.
            if _code(error) not in _CLOSED or _beside(self.path, "-wal").exists():
                raise
        # SQLite creates sidecar files even to read, which fails in a read-only folder unless the database is immutable.
        with OpenResource(lambda: self._open("mode=ro&immutable=1")) as opened:
            self._version(opened.resource)
            return _tolerant(job, opened.resource)

    def _write(self, job: "Job[T]") -> T:
        if not _has_content(self.path):
            self._make()
        with OpenResource(self._open) as opened:
            # Both are off by default: deletion of the content with its report, and overwriting of deleted cells.
            opened.resource.execute("PRAGMA foreign_keys = ON")
            opened.resource.execute("PRAGMA secure_delete = ON")
            return self._in_transaction(opened.resource, job)

    def _in_transaction(self, connection: sqlite3.Connection, job: "Job[T]") -> T:
        """Run a job in a transaction, after a migration if needed. An error leaves all unchanged: closing the
        connection rolls back."""
        # The version is read inside the transaction: another process may migrate first.
        connection.execute("BEGIN IMMEDIATE")
        _upgrade(connection, self._version(connection))
        found = job(connection)
        connection.execute("COMMIT")
        return found

    def _open(self, how: str = "mode=rw") -> sqlite3.Connection:
        self._close_to_others()
        uri = f"{self.path.absolute().as_uri()}?{how}"
        # `isolation_level=None`: otherwise Python begins transactions of its own.
        return sqlite3.connect(uri, uri=True, timeout=self.wait, isolation_level=None)

    def _close_to_others(self) -> None:
        """Close the files of the history to other users: they contain cells."""
        # SQLite gives its sidecar files the permissions of the database.
        beside = (_beside(self.path, end) for end in ("", *SIDECARS, "-lock"))
        aside = self.path.parent.glob(f"{escape(self.path.stem)}.broken-*")
        for path in (*([self.path.parent] if self.own_folder else []), *beside, *aside):
            make_private(path)

    def _version(self, connection: sqlite3.Connection) -> int:
        """Return the version of the database. Raises `HistoryError` for a database of another program or of a newer
        version."""
        ((owner,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        if owner != APPLICATION:
            raise self._history_error("is a database of another program", "remove JAXSHARD_HISTORY")
        if version > len(VERSIONS):
            why = f"was made by a newer jaxshard_magic (its version {version}, this one reads {len(VERSIONS)})"
            fix = upgrade_command()
            raise self._history_error(why, fix, fix)
        return version

    def _make(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            if _has_content(self.path):
                return
            new = _beside(self.path, "-new")
            for stale in (new, *(_beside(path, end) for path in (new, self.path) for end in SIDECARS)):
                stale.unlink(missing_ok=True)
            with OpenResource(lambda: sqlite3.connect(private_file(new), isolation_level=None)) as opened:
                connection: sqlite3.Connection = opened.resource
                # Takes effect only before the first table is created.
                connection.execute("PRAGMA auto_vacuum = FULL")
                with suppress(sqlite3.OperationalError):  # a file system without shared memory
                    connection.execute(f"PRAGMA journal_mode = {'WAL' if _is_local(new) else 'DELETE'}")
                connection.execute("BEGIN IMMEDIATE")
                _upgrade(connection, 0)
                connection.execute("COMMIT")
            # Renamed when complete, so that no process opens a half-made database.
            os.replace(new, self.path)

    def _set_aside(self, found: tuple[int, int] | None) -> None:
        """Move a damaged file with its sidecars aside, unless another process has.

        Args:
            found: Device and inode of the damaged file, from `_identity`.
        """
        with self._locked():
            if _identity(self.path) != found:
                return
            now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
            aside = self.path.with_name(f"{self.path.stem}.broken-{now}{self.path.suffix}")
            # Sidecar files first: a new database at this path must not find the old log.
            for end in (*SIDECARS, ""):
                with suppress(FileNotFoundError):
                    os.replace(_beside(self.path, end), _beside(aside, end))
        self.tell(f"the history {self.path} was damaged: it now lies in {aside.name}, and a new one is begun")

    def _locked(self) -> OpenResource:
        def opening() -> sqlite3.Connection:
            held = sqlite3.connect(private_file(_beside(self.path, "-lock")), timeout=self.wait, isolation_level=None)
            # The open transaction is the lock: SQLite releases it with the process, however that ends.
            held.execute("BEGIN EXCLUSIVE")
            return held

        return OpenResource(opening)

    def _describe_error(self, error: Exception) -> tuple[str, str]:
        """Return the failure in words, and a remedy."""
        code = _code(error)
        if code in _BUSY:
            return f"has been locked by another process for {self.wait:g} s", "try again when that is done"
        if code == sqlite3.SQLITE_FULL:
            return "has no room left on its disk", "free some"
        if code == sqlite3.SQLITE_IOERR:
            return (f"can't be read or written ({error})", "see whether its disk is full, over its quota or gone")
        if code in _CLOSED or isinstance(error, OSError):
            said = error.strerror if isinstance(error, OSError) else error
            return f"can't be opened and written ({said})", "make its folder one that you can write to"
        return f"can't be used ({error})", "move that file away"

    def _history_error(self, why: str, what_to_do: str, fix: str | None = None) -> HistoryError:
        line = f"the history {self.path} {why}: {what_to_do}, or set JAXSHARD_HISTORY to another file"
        return HistoryError(line, fix=fix)


def _upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Migrate from `version` to the newest one, inside a transaction."""
    for statements in VERSIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    if version < len(VERSIONS):
        # Both are part of the file's header, and so of the transaction.
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def _tolerant(job: "Job[T]", connection: sqlite3.Connection) -> T:
    """Run a reading job; text of a damaged row that is no UTF-8 is decoded with replacement characters."""
    try:
        return job(connection)
    except sqlite3.OperationalError as error:
        # sqlite3 has no error code for text that is not UTF-8, only the message.
        if "decode" not in str(error).lower():
            raise
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return job(connection)


def _code(error: Exception) -> int:
    """Return SQLite's primary result code, without the extended bits."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _has_content(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file, None without one."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _is_local(path: Path) -> bool:
    """Return whether a file is on a file system of this machine alone."""
    place = path.absolute().resolve()
    mounted = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    nearest = max(mounted, key=lambda p: len(p.mountpoint), default=None)
    return nearest is not None and nearest.fstype.lower() in _LOCAL and "remote" not in nearest.opts
