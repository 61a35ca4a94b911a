"""`%shard history`: list stored reports, and store the reports of this notebook."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, parse_count
from .displays import say
from .options import HistoryOptions, flags_text, parse_command

if TYPE_CHECKING:
    from ..history import Calibration, History, Store
    from ..report import Report

MAX_NUMBER = 10**15  # of a report
MOST_WORDS = 100
WAIT = 2.0  # seconds to wait for another process that writes
_AGO = {"h": "hours", "d": "days", "w": "weeks"}


class HistoryWriter:
    """Writer of a notebook's reports into the user's history.

    Reports are written after their cell has ended, so the output of a cell does not wait for the database. Each reason
    for a failed write is printed once.

    Args:
        shell: IPython's shell.
        tell: Prints a warning.
    """

    def __init__(self, shell: Any, tell: Callable[[str], None] = say):
        self._shell, self._tell = shell, tell
        self._store: Store | None = None
        self._waiting: list[tuple[Report, str | None]] = []
        self._reserved: set[int] = set()  # reserved numbers without a report so far
        self._last: int | None = None  # number of the report added last
        self._told: set[str] = set()

    @property
    def store(self) -> "Store":
        """History of all notebooks, opened at the first use."""
        from ..history import Store

        if self._store is None:
            self._store = Store(wait=WAIT, tell=self._warn_once)
        return self._store

    def reserve(self, count: int) -> range | None:
        """Reserve consecutive report numbers.

        Returns:
            The numbers; None if the history can't be written.
        """
        from ..history import HistoryError

        try:
            found = self.store.reserve(count)
        except HistoryError as error:
            self._warn_once(f"not kept: {error}")
            return None
        self._reserved.update(found)
        return found

    def enqueue(self, report: "Report", cell: str | None = None) -> None:
        """Queue a report for the history.

        Args:
            report: A report with the number of the last stored report replaces the stored one.
            cell: Text of the cell that made the report.
        """
        self._waiting.append((report, cell))

    def write(self, *_: object) -> None:
        """Write the queued reports. IPython calls this after each cell, once the result is displayed."""
        waiting, self._waiting = self._waiting, []
        for report, cell in waiting:
            self._write(report, cell)

    def _write(self, report: "Report", cell: str | None) -> None:
        """Add one report to the history, or replace the last stored report of the same number."""
        from ..history import HistoryError

        try:
            if self._last is not None and report.number == self._last:
                self.store.replace(self._last, report)
            else:
                self._last, number = None, report.number if report.number in self._reserved else None
                known = {"notebook": self._notebook(), "versions": _versions(), "number": number}
                self.store.add(report, cell=cell, **known)
                self._reserved.discard(number)
                self._last = number
        except HistoryError as error:
            self._last = None
            self._warn_once(f"not kept: {error}")

    def _warn_once(self, said: str) -> None:
        """Print a warning not printed before."""
        if said not in self._told:
            self._told.add(said)
            self._tell(said)

    def _notebook(self) -> str | None:
        """Return the notebook's file as named by Jupyter or VS Code; None if neither names one."""
        return os.environ.get("JPY_SESSION_NAME") or self._shell.user_ns.get("__vsc_ipynb_file__")


def run_history_line(line: str, store: "Store") -> "tuple[History | Calibration | Report | None, str | None]":
    """Run a `%shard history` line.

    Args:
        line: The line, from the word `history` on.
        store: History to read.

    Returns:
        A table of reports, a calibration or a single report, and the name to bind the result to; None and None for
        `--help`.

    Raises:
        ShardError: The line is malformed, or the history can't be read.
    """
    from ..history import SHOWN, History, calibration
    from ..report.records import writable_path

    options = parse_command(line, HistoryOptions)
    if options.help:
        print(help_text())
        return None, None
    if options.json is not None:
        writable_path(options.json, overwrite=options.force)
    if len(options.words) > MOST_WORDS:
        raise ShardError(f"%shard history looks for {MOST_WORDS} words at most, not {len(options.words):,}")
    number = parse_count(options.words[0], MAX_NUMBER) if len(options.words) == 1 else None
    if number is not None and options.json is not None:
        raise ShardError(
            f"--json writes what was found by words; of one report: %shard history {number} -o r, then r.to_json()"
        )
    if options.calibration and (number is not None or options.json is not None):
        raise ShardError("--calibration is of many reports, and shown: leave the number and --json out")
    if number is not None:
        return replace(store.report(number), number=number), options.output
    rows = store.rows(
        options.words,
        strategy=options.strategy,
        name=options.name,
        since=None if options.since is None else since(options.since, datetime.now()),
    )
    if options.calibration:
        return calibration(rows, _searched(options)), options.output
    found = History(tuple(rows), store, _searched(options), options.limit or SHOWN)
    if options.json is not None:
        say(f"written to {found.to_json(options.json)}")
    return found, options.output


def _searched(options: HistoryOptions) -> str:
    """Return the search of a line as text, `fsdp --since 7d`, without options for display, output and files."""
    filters = {"--strategy": options.strategy, "--name": options.name, "--since": options.since}
    return " ".join([*options.words, *(f"{flag} {value}" for flag, value in filters.items() if value is not None)])


def since(text: str, now: datetime) -> datetime:
    """Return the point in time given by `--since`: `3h`, `7d`, `2w` before `now`, or a day such as 2026-11-01.

    >>> since("7d", datetime(2026, 11, 8, 12))
    datetime.datetime(2026, 11, 1, 12, 0)

    Raises:
        ShardError: The text has another form.
    """
    if ago := re.fullmatch(r"(\d{1,4})([hdw])", text):
        return now - timedelta(**{_AGO[ago[2]]: int(ago[1])})
    try:
        day = datetime.fromisoformat(text)
        day.timestamp()  # raises here, not in the search, for the first and the last years
        return day
    except (ValueError, OverflowError, OSError):
        raise ShardError(f"--since takes 3h, 7d, 2w, or a day such as {now:%Y-%m-%d}, not {text!r}") from None


def help_text() -> str:
    """Return the text printed by `%shard history --help`."""
    return f"""The reports of all notebooks, newest first.

    %shard history                 all of them
    %shard history fsdp gpt        those with these words in their step, strategy, mesh, options or cell
    %shard history 12              report 12 in full
    %shard history --calibration   what chips took beside what was predicted

{flags_text(HistoryOptions)}

They lie in a database in your data folder, with their cells and the versions that ran them; nothing of arrays' contents
does. %config ShardSession.remember = False keeps none."""


@cache
def _versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages, stored with each report."""
    from ..packages import installed

    known = {name: version for name, version in installed().items() if version is not None}
    return {"python": ".".join(map(str, sys.version_info[:3])), **known}
