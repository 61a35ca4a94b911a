"""What was found in the history: its rows, shown as a table, and the reports behind them."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, overload

from ..errors import ShardError
from ..packages import data_frame
from ..report import Report
from ..report.written import Shown, saved
from .row import COLUMNS, Row
from .store import Store

SHOWN = 50
SCHEMA = 1  # of the JSON


@dataclass(frozen=True, repr=False)
class History(Shown):
    """Rows of the history, newest first; `history[12]` is report 12 in full.

    `asked`: what was searched for, as it was typed; empty for all. `shown`: so many rows at most stand in the table.
    """

    rows: tuple[Row, ...]
    store: Store
    asked: str = ""
    shown: int = SHOWN

    def __getitem__(self, number: int) -> Report:
        """The report of a number. Raises ShardError where there is none."""
        return self.store.report(number)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _ways(self) -> tuple[Any, Any, Any]:
        from ..views import history

        return history.to_text, history.to_html, history.page

    def to_pandas(self) -> Any:
        """The rows as a DataFrame, by number. Raises ShardError where pandas is not installed."""
        return data_frame(map(vars, self.rows), COLUMNS).set_index("id")

    @overload
    def to_json(self, path: None = None) -> str: ...
    @overload
    def to_json(self, path: str | os.PathLike[str]) -> Path: ...

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str | Path:
        """The rows with their reports and cells in full, as JSON text or written to `path`; null for a report that has
        been removed since.

        Returns the text, or the path that was written. `Report.from_dict(json.loads(text)["rows"][0]["report"])` is an
        equal report.
        """
        contents = self.store.contents([row.id for row in self.rows])
        rows = [_plain(row, *contents.get(row.id, (None, None))) for row in self.rows]
        text = json.dumps({"schema": SCHEMA, "rows": rows}, allow_nan=False)
        return text if path is None else saved(path, text)

    def _short(self) -> str:
        return f"<History: {len(self.rows)} reports>"


def _plain(row: Row, report: str | None, cell: str | None) -> dict[str, Any]:
    try:
        known = None if report is None else json.loads(report)
    except (ValueError, RecursionError):
        raise ShardError(
            f"report {row.id} of the history is damaged: %shard history {row.id} says more"
        ) from None
    return asdict(row) | {"at": row.at.isoformat(), "report": known, "cell": cell}
