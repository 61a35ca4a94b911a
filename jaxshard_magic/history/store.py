"""Store of Reports in the history; drops the oldest beyond a limit.

`History` is the result of a search: rows shown as a table, with access to their reports.
"""

import json
import os
import sqlite3
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, overload
from uuid import uuid4

import platformdirs

from ..errors import ShardError, list_names
from ..files import inflated
from ..packages import data_frame
from ..report import Report
from ..report.records import Displayable, write_file
from .database import Database, HistoryError
from .row import COLUMNS, Row, encodable, fold_case, parse_row, report_columns, search_text, sqlite_values

MOST = 20_000  # reports
MOST_BYTES = 256 * 2**20  # bytes of all reports and cells, compressed
MOST_TEXT = 256 * 2**20  # bytes of one report as JSON
WAIT = 10.0  # seconds to wait for another process that writes
LEVEL = 1  # of zlib: higher levels save a few percent of a large report and take six times as long
SHOWN = 50  # rows
SCHEMA = 1  # version of the JSON of a `History`
_SELECT = "SELECT " + ", ".join(f'report."{name}"' for name in COLUMNS) + " FROM report"
_NEAR = 3

T = TypeVar("T")


class Store:
    """History in one SQLite file.

    The file is created on first use and open only during a call: any thread, any process and any number of notebooks
    may use the same file at once.

    Methods raise `HistoryError` where the file can't be read or written. A damaged file is moved aside and a new one
    begun, with a call of `tell`.

    Args:
        path: Database file; by default the variable JAXSHARD_HISTORY, or a file in the user's data folder.
        wait: Seconds to wait for another process that writes.
        tell: Called with a line about a damaged file; `warnings.warn` by default.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        wait: float = WAIT,
        tell: Callable[[str], object] = warnings.warn,
    ):
        self.path = default_path() if path is None else Path(path)
        self._database = Database(self.path, wait, tell, own_folder=self.path.parent == _data_folder())
        self._writer = uuid4().hex

    def __repr__(self) -> str:
        return f"<Store {str(self.path)!r}>"

    def reserve(self, count: int) -> range:
        """Reserve consecutive numbers for `add`, which no other report gets.

        Raises:
            HistoryError: The file can't be written.
        """

        def take(connection: sqlite3.Connection) -> range:
            updated = connection.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'report'", (count,))
            # SQLite creates the row of a table at its first insert.
            if not updated.rowcount:
                connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('report', ?)", (count,))
            ((last,),) = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'report'")
            return range(last - count + 1, last + 1)

        return self._database.write(take)

    def add(
        self,
        report: Report,
        *,
        cell: str | None,
        notebook: str | None,
        versions: Mapping[str, str],
        number: int | None = None,
    ) -> int:
        """Store a report with its cell.

        Args:
            report: Report.
            cell: Source of the cell that made the report; None without one.
            notebook: Name or path of the notebook.
            versions: Versions of the packages in use, by name.
            number: Reserved number; the next one by default.

        Returns:
            The number of the report.

        Raises:
            HistoryError: The file can't be written, or the report is too large.
        """
        known = {"notebook": notebook, "versions": dict(versions), "has_cell": cell is not None}
        columns = report_columns(report) | known | {"at": time.time(), "writer": self._writer}
        content = _content(columns, cell, report)

        def insert(connection: sqlite3.Connection) -> int:
            given = {"size": _size(content)} | ({} if number is None else {"id": number})
            made = _insert(connection, "report", sqlite_values(columns) | given)
            _insert(connection, "content", content | {"id": made})
            _drop_oldest(connection)
            return made

        return self._database.write(insert)

    def replace(self, number: int, report: Report) -> None:
        """Replace a report of this Store by a later one of the same run; number, cell and time stay.

        Args:
            number: Number of the report.
            report: Later report.

        Raises:
            HistoryError: The file can't be written, or the report has been removed.
        """
        columns = report_columns(report)

        def update(connection: sqlite3.Connection) -> None:
            found = connection.execute(
                "SELECT notebook, cell FROM report JOIN content USING (id) WHERE id = ? AND writer = ?",
                (number, self._writer),
            ).fetchone()
            if found is None:
                raise HistoryError(f"report {number} is no longer in the history {self.path}: run its cell again")
            notebook, cell = found[0], None if found[1] is None else _decompress(found[1])
            content = _content(columns | {"notebook": notebook}, cell, report)
            _update(connection, "report", number, sqlite_values(columns) | {"size": _size(content)})
            _update(connection, "content", number, content)
            _drop_oldest(connection)

        self._database.write(update)

    def rows(
        self,
        words: Sequence[str] = (),
        *,
        strategy: str | None = None,
        name: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> list[Row]:
        """Return rows, newest first; rows damaged on disk are left out, with a call of `tell`.

        Args:
            words: Words that must all occur in name, strategy, mesh, options, device, notebook or cell; case is
                ignored.
            strategy: Exact strategy.
            name: Exact name.
            since: Earliest time, inclusive; local time if naive.
            until: Latest time, exclusive; local time if naive.
            limit: Maximum number of rows.

        Raises:
            HistoryError: The file can't be read.
        """
        asked: dict[str, Any] = {
            "strategy = ?": None if strategy is None else encodable(strategy),
            "name = ?": None if name is None else encodable(name),
            "at >= ?": None if since is None else since.timestamp(),
            "at < ?": None if until is None else until.timestamp(),
        }
        asked = {clause: value for clause, value in asked.items() if value is not None}
        clauses = [*asked, *["instr(searched, ?)"] * len(words)]
        # Texts are in a table of their own, so that a search without words does not read them.
        sql = _SELECT + " JOIN content USING (id)" * bool(words)
        sql += f" WHERE {' AND '.join(clauses)}" * bool(clauses) + " ORDER BY report.id DESC LIMIT ?"
        values = [*asked.values(), *map(fold_case, words), -1 if limit is None else limit]
        found = self._database.read(lambda c: c.execute(sql, values).fetchall(), [])
        rows, damaged = list[Row](), list[int]()
        for each in found:
            try:
                rows.append(parse_row(each))
            except (ValueError, TypeError, OverflowError, OSError, RecursionError):
                damaged.append(each[0])
        if damaged:
            more = f" and {len(damaged) - 1} more are" if len(damaged) > 1 else ", which is"
            self._database.tell(f"left out{more} damaged: {self._damaged(damaged[0])}")
        return rows

    def report(self, number: int) -> Report:
        """Return a report in full. Raises ShardError for an unknown number or a damaged report."""
        return Report.from_json(self._content_of(number)[0])

    def cell(self, number: int) -> str | None:
        """Return the source of the cell that made a report; None without one. Raises ShardError for an unknown number
        or a damaged report."""
        return self._content_of(number)[1]

    def contents(self, numbers: Iterable[int]) -> dict[int, tuple[str, str | None]]:
        """Return JSON text and cell of reports, by number; unknown numbers are left out. Raises ShardError for a
        damaged report."""
        chosen = list(numbers)

        def select(connection: sqlite3.Connection) -> list[tuple[int, bytes, bytes | None]]:
            sql = "SELECT id, report, cell FROM content WHERE id = ? AND length(report) + ifnull(length(cell), 0) <= ?"
            return [found for number in chosen for found in connection.execute(sql, (number, MOST_BYTES))]

        read = dict[int, tuple[str, str | None]]()
        for number, report, cell in self._database.read(select, []):
            try:
                read[number] = _decompress(report), None if cell is None else _decompress(cell)
            except (ValueError, TypeError, MemoryError):
                raise self._damaged(number) from None
        return read

    def _damaged(self, number: int) -> ShardError:
        out = f"jaxshard_magic.history.Store({str(self.path)!r}).remove([{number}])"
        return ShardError(f"report {number} of the history {self.path} is damaged: remove it, {out}", fix=out)

    def _content_of(self, number: int) -> tuple[str, str | None]:
        found = self.contents([number]).get(number)
        if found is None:
            raise self._database.read(lambda connection: _no_report(connection, number), _none_yet(number))
        return found

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove reports; all stay, with a ShardError, if one is unknown."""
        chosen = list(dict.fromkeys(numbers))

        def delete(connection: sqlite3.Connection) -> None:
            for number in chosen:
                if not connection.execute("DELETE FROM report WHERE id = ?", (number,)).rowcount:
                    raise _no_report(connection, number)

        self._database.write(delete)

    def clear(self) -> None:
        """Remove all reports; numbering continues."""
        self._database.write(lambda connection: connection.execute("DELETE FROM report"))


def default_path() -> Path:
    """Return the path in the variable JAXSHARD_HISTORY, or a file in the user's data folder."""
    given = os.environ.get("JAXSHARD_HISTORY")
    return Path(os.path.expanduser(given)) if given else _data_folder() / "history.sqlite3"


def _data_folder() -> Path:
    return platformdirs.user_data_path("jaxshard_magic", appauthor=False)


def _content(columns: Mapping[str, Any], cell: str | None, report: Report) -> dict[str, Any]:
    text = json.dumps(report.to_dict(), allow_nan=False)
    content = {
        "searched": search_text(columns, cell),
        "cell": None if cell is None else _compress(cell),
        "report": _compress(text),
    }
    # JSON is ASCII, a byte per character; a character of a cell takes up to 4 bytes.
    if _size(content) > MOST_BYTES or len(text) > MOST_TEXT or len(cell or "") > MOST_TEXT // 4:
        raise HistoryError(
            f"this report is larger than the {MOST_BYTES:,} bytes that the history keeps: report.to_json() writes it"
        )
    return content


def _compress(text: str) -> bytes:
    # A cell may contain lone surrogates, which plain UTF-8 refuses.
    return zlib.compress(text.encode("utf-8", "surrogatepass"), LEVEL)


def _decompress(packed: Any) -> str:
    """Return the text of compressed bytes. Raises ValueError or TypeError for other values."""
    return inflated(packed, MOST_TEXT).decode("utf-8", "surrogatepass")


def _size(content: Mapping[str, Any]) -> int:
    """Return the total bytes of the values."""
    return sum(len(v.encode() if isinstance(v, str) else v) for v in content.values() if v is not None)


def _insert(connection: sqlite3.Connection, table: str, values: Mapping[str, Any]) -> int:
    names, places = ", ".join(f'"{name}"' for name in values), ", ".join(f":{name}" for name in values)
    return connection.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", values).lastrowid or 0


def _update(connection: sqlite3.Connection, table: str, number: int, values: Mapping[str, Any]) -> None:
    pairs = ", ".join(f'"{name}" = :{name}' for name in values)
    connection.execute(f"UPDATE {table} SET {pairs} WHERE id = :id", {**values, "id": number})


def _drop_oldest(connection: sqlite3.Connection) -> None:
    """Delete the oldest reports beyond `MOST` reports or `MOST_BYTES` bytes."""
    ((count, size),) = connection.execute("SELECT count(*), total(size) FROM report")
    if count > MOST or size > MOST_BYTES:
        connection.execute(
            "DELETE FROM report WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER newest AS nth,"
            " sum(size) OVER newest AS held FROM report WINDOW newest AS (ORDER BY id DESC))"
            " WHERE nth > ? OR held > ?)",
            (MOST, MOST_BYTES),
        )


def _no_report(connection: sqlite3.Connection, number: int) -> ShardError:
    ordered = "SELECT id FROM report ORDER BY abs(id - ?), id DESC LIMIT ?"
    near = [found for (found,) in connection.execute(ordered, (number, _NEAR))]
    ((latest,),) = connection.execute("SELECT max(id) FROM report")
    if latest is None:
        return _none_yet(number)
    return ShardError(
        f"no report {number} in the history; the nearest are {list_names(sorted(near))}, the latest is {latest}"
    )


def _none_yet(number: int) -> ShardError:
    return ShardError(f"no report {number}: the history is empty")


@dataclass(frozen=True, repr=False)
class History(Displayable):
    """Rows of the history, newest first; `history[12]` is report 12 in full.

    Attributes:
        rows: Rows found.
        store: Database with the reports.
        asked: Search text as typed; empty for all reports.
        shown: Maximum number of rows in the table.
    """

    rows: tuple[Row, ...]
    store: Store
    asked: str = ""
    shown: int = SHOWN

    def __getitem__(self, number: int) -> Report:
        """Return the report with a number. Raises ShardError without one."""
        return self.store.report(number)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> Any:
        """Return the rows as a DataFrame indexed by number. Raises ShardError without pandas."""
        return data_frame(map(vars, self.rows), COLUMNS).set_index("id")

    @overload
    def to_json(self, path: None = None) -> str: ...
    @overload
    def to_json(self, path: str | os.PathLike[str]) -> Path: ...

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """Write the rows as JSON, with reports and cells in full; null for a report removed since.

        `Report.from_dict(json.loads(text)["rows"][0]["report"])` is an equal report.

        Args:
            path: File to write; None returns the text.

        Returns:
            The text, or the path of the file.

        Raises:
            ShardError: A report is damaged.
        """
        contents = self.store.contents([row.id for row in self.rows])
        rows = [_plain(row, *contents.get(row.id, (None, None))) for row in self.rows]
        text = json.dumps({"schema": SCHEMA, "rows": rows}, allow_nan=False)
        return text if path is None else write_file(path, text)

    def _summary_line(self) -> str:
        return f"<History: {len(self.rows)} reports>"


def _plain(row: Row, report: str | None, cell: str | None) -> dict[str, Any]:
    try:
        known = None if report is None else json.loads(report)
    except (ValueError, RecursionError):
        raise ShardError(f"report {row.id} of the history is damaged: %shard history {row.id} says more") from None
    return asdict(row) | {"at": row.at.isoformat(), "report": known, "cell": cell}
