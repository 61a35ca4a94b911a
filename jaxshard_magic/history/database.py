"""The SQLite file of the history: made, opened for one job at a time, migrated, and set aside when it is damaged.

No process ever sees half of it: it is made beside its place and put there whole, and one that is damaged is moved by
one process alone. Both are done by who holds the lock, an empty database of its own that is released with its holder.
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
from ..files import close_to_others, own_file
from ..packages import upgrade
from ..temporary import Opened

APPLICATION = 0x6A736D31  # of the file's header: says that it is a history
SIDECARS = (
    "-wal",
    "-shm",
    "-journal",
)  # beside the database while it is open, or after its process was killed

# The statements that make each version of the database of the one before it.
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

# File systems of this machine alone. Elsewhere a write-ahead log, which is shared through memory, may break.
_LOCAL = {
    "apfs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hfs",
    "ntfs",
    "overlay",
    "refs",
    "tmpfs",
    "xfs",
    "zfs",
}

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
_CLOSED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH}

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]


class Unkept(ShardError):
    """The history can't be read or written; the message says why and what to do. What is in it stays as it is."""


@dataclass(frozen=True)
class Database:
    """`wait`: seconds that another process may hold it; `tell` is called with one line when it was damaged;
    `own_folder`: nothing but the history lies in its folder, which is closed to others with it."""

    path: Path
    wait: float
    tell: Callable[[str], object] = warnings.warn
    own_folder: bool = False

    def read(self, job: "Job[T]", without: T) -> T:
        """What `job` gets of it; `without` where there is none yet. Raises Unkept."""
        return self._sound(lambda: self._read(job) if _there(self.path) else without)

    def write(self, job: "Job[T]") -> T:
        """What `job` gets of it in a transaction of its own, the database made if there is none. Raises Unkept."""
        return self._sound(lambda: self._write(job))

    def _sound(self, attempt: Callable[[], T]) -> T:
        """Another attempt after the database was found damaged, and moved aside."""
        if self.path.is_dir():
            file = self.path / "history.sqlite3"
            raise Unkept(f"the history {self.path} is a folder: set JAXSHARD_HISTORY to a file in it, {file}")
        if self.path.exists() and not self.path.is_file():  # else it would be replaced by one
            raise self._unkept(
                "is a pipe or a device", "%config ShardSession.remember = False keeps no history"
            )
        try:
            found = _identity(self.path)
            try:
                return attempt()
            except sqlite3.DatabaseError as error:
                if _code(error) in _DAMAGED:
                    self._set_aside(found)
                elif found is None or _there(self.path):
                    raise
            return attempt()
        except (sqlite3.DatabaseError, OSError) as error:
            raise self._unkept(*self._reason(error)) from error

    def _read(self, job: "Job[T]") -> T:
        try:
            with Opened(self._open) as opened:
                if self._version(opened.it) < len(VERSIONS):
                    self._in_transaction(opened.it, lambda _: None)
                return _tolerant(job, opened.it)
        except sqlite3.OperationalError as error:
            if _code(error) not in _CLOSED or _beside(self.path, "-wal").exists():
                raise
        with Opened(lambda: self._open("mode=ro&immutable=1")) as opened:  # of a folder that can't be written
            self._version(opened.it)
            return _tolerant(job, opened.it)

    def _write(self, job: "Job[T]") -> T:
        if not _there(self.path):
            self._make()
        with Opened(self._open) as opened:
            opened.it.execute("PRAGMA foreign_keys = ON")
            opened.it.execute("PRAGMA secure_delete = ON")
            return self._in_transaction(opened.it, job)

    def _in_transaction(self, connection: sqlite3.Connection, job: "Job[T]") -> T:
        """Migrates first where that has to be. An error leaves all as it was: closing rolls back."""
        connection.execute("BEGIN IMMEDIATE")
        _upgrade(connection, self._version(connection))
        found = job(connection)
        connection.execute("COMMIT")
        return found

    def _open(self, how: str = "mode=rw") -> sqlite3.Connection:
        self._close_to_others()
        uri = f"{self.path.absolute().as_uri()}?{how}"
        return sqlite3.connect(uri, uri=True, timeout=self.wait, isolation_level=None)

    def _close_to_others(self) -> None:
        """A history holds cells, and SQLite gives what lies beside it the rights of the database."""
        beside = (_beside(self.path, end) for end in ("", *SIDECARS, "-lock"))
        aside = self.path.parent.glob(f"{escape(self.path.stem)}.broken-*")
        for path in (*([self.path.parent] if self.own_folder else []), *beside, *aside):
            close_to_others(path)

    def _version(self, connection: sqlite3.Connection) -> int:
        """Raises Unkept where it is not for us to read."""
        ((owner,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        if owner != APPLICATION:
            raise self._unkept("is a database of another program", "remove JAXSHARD_HISTORY")
        if version > len(VERSIONS):
            why = (
                f"was made by a newer jaxshard_magic (its version {version}, this one reads {len(VERSIONS)})"
            )
            fix = upgrade()
            raise self._unkept(why, fix, fix)
        return version

    def _make(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():
            if _there(self.path):
                return
            new = _beside(self.path, "-new")
            for stale in (new, *(_beside(path, end) for path in (new, self.path) for end in SIDECARS)):
                stale.unlink(missing_ok=True)
            with Opened(lambda: sqlite3.connect(own_file(new), isolation_level=None)) as opened:
                connection: sqlite3.Connection = opened.it
                connection.execute("PRAGMA auto_vacuum = FULL")
                with suppress(sqlite3.OperationalError):  # the file system has no shared memory
                    connection.execute(f"PRAGMA journal_mode = {'WAL' if _is_local(new) else 'DELETE'}")
                connection.execute("BEGIN IMMEDIATE")
                _upgrade(connection, 0)
                connection.execute("COMMIT")
            os.replace(new, self.path)

    def _set_aside(self, found: tuple[int, int] | None) -> None:
        """Move the damaged file `found`, unless another process has, with what lies beside it first: a new database
        must not find that."""
        with self._locked():
            if _identity(self.path) != found:
                return
            now = f"{datetime.now():%Y%m%d-%H%M%S-%f}"
            aside = self.path.with_name(f"{self.path.stem}.broken-{now}{self.path.suffix}")
            for end in (*SIDECARS, ""):
                with suppress(FileNotFoundError):
                    os.replace(_beside(self.path, end), _beside(aside, end))
        self.tell(f"the history {self.path} was damaged: it now lies in {aside.name}, and a new one is begun")

    def _locked(self) -> Opened:
        def opening() -> sqlite3.Connection:
            held = sqlite3.connect(
                own_file(_beside(self.path, "-lock")), timeout=self.wait, isolation_level=None
            )
            held.execute("BEGIN EXCLUSIVE")
            return held

        return Opened(opening)

    def _reason(self, error: Exception) -> tuple[str, str]:
        """What is the matter, and what to do."""
        code = _code(error)
        if code in _BUSY:
            return f"has been locked by another process for {self.wait:g} s", "try again when that is done"
        if code == sqlite3.SQLITE_FULL:
            return "has no room left on its disk", "free some"
        if code == sqlite3.SQLITE_IOERR:
            return (
                f"can't be read or written ({error})",
                "see whether its disk is full, over its quota or gone",
            )
        if code in _CLOSED or isinstance(error, OSError):
            said = error.strerror if isinstance(error, OSError) else error
            return f"can't be opened and written ({said})", "make its folder one that you can write to"
        return f"can't be used ({error})", "move that file away"

    def _unkept(self, why: str, what_to_do: str, fix: str | None = None) -> Unkept:
        line = f"the history {self.path} {why}: {what_to_do}, or set JAXSHARD_HISTORY to another file"
        return Unkept(line, fix=fix)


def _upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Inside a transaction, from `version` to the newest."""
    for statements in VERSIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    if version < len(VERSIONS):
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(VERSIONS)}")


def _tolerant(job: "Job[T]", connection: sqlite3.Connection) -> T:
    """What a job reads; of text that is none, in a damaged row, what can be read of it."""
    try:
        return job(connection)
    except sqlite3.OperationalError as error:
        if "decode" not in str(error).lower():
            raise
    connection.text_factory = lambda text: text.decode("utf-8", "replace")
    return job(connection)


def _code(error: Exception) -> int:
    """SQLite's primary result code, without what extends it."""
    return getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF


def _there(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        return False


def _identity(path: Path) -> tuple[int, int] | None:
    """The same as long as it is the same file; None where there is none."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def _beside(path: Path, end: str) -> Path:
    return path.with_name(path.name + end)


def _is_local(path: Path) -> bool:
    """Whether the file lies in a file system that no other machine has."""
    place = path.absolute().resolve()
    mounted = [p for p in psutil.disk_partitions(all=True) if place.is_relative_to(p.mountpoint)]
    nearest = max(mounted, key=lambda p: len(p.mountpoint), default=None)
    return nearest is not None and nearest.fstype.lower() in _LOCAL and "remote" not in nearest.opts
