"""Result of a search of the history: rows shown as a table, with access to their reports."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

from ..errors import ShardError
from ..packages import data_frame
from ..report import Report
from ..report.records import Displayable, write_file
from .row import COLUMNS, Row
from .store import Store

SHOWN = 50
SCHEMA = 1  # version of the JSON


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
