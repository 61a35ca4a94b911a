"""`%shard history`, and the reports of this notebook on their way into it."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from ..errors import ShardError, whole_number
from .displays import say
from .options import HistoryOptions, flags_text, parse_command

if TYPE_CHECKING:
    from ..history import Calibration, History, Store
    from ..report import Report

MOST = 10**15  # the largest number that a report may have
MOST_WORDS = 100
WAIT = 2.0  # seconds that a cell waits for another process that writes
_AGO = {"h": "hours", "d": "days", "w": "weeks"}


class Keeping:
    """Puts the reports of a notebook into the user's history: behind their cell, whose output does not wait for it.
    What keeps it from that is told once."""

    def __init__(self, shell: Any, tell: Callable[[str], None] = say):
        self._shell, self._tell = shell, tell
        self._store: Store | None = None
        self._waiting: list[tuple[Report, str | None]] = []
        self._reserved: set[int] = set()  # what no report has yet
        self._last: int | None = None  # the report that was added last
        self._told: set[str] = set()

    @property
    def store(self) -> "Store":
        from ..history import Store

        if self._store is None:
            self._store = Store(wait=WAIT, tell=self._once)
        return self._store

    def reserve(self, count: int) -> range | None:
        """Numbers for so many reports; None where they can't be had."""
        from ..history import Unkept

        try:
            found = self.store.reserve(count)
        except Unkept as error:
            self._once(f"not kept: {error}")
            return None
        self._reserved.update(found)
        return found

    def keep(self, report: "Report", cell: str | None = None) -> None:
        """Keep a report with the cell that made it; it takes the place of the one before that has its number."""
        self._waiting.append((report, cell))

    def write(self, *_: object) -> None:
        """Write what waits. IPython calls it when a cell has ended, and shown what it gave."""
        waiting, self._waiting = self._waiting, []
        for report, cell in waiting:
            self._write(report, cell)

    def _write(self, report: "Report", cell: str | None) -> None:
        from ..history import Unkept

        try:
            if self._last is not None and report.number == self._last:
                self.store.replace(self._last, report)
            else:
                self._last, number = None, report.number if report.number in self._reserved else None
                known = {"notebook": self._notebook(), "versions": _versions(), "number": number}
                self.store.add(report, cell=cell, **known)
                self._reserved.discard(number)
                self._last = number
        except Unkept as error:
            self._last = None
            self._once(f"not kept: {error}")

    def _once(self, said: str) -> None:
        if said not in self._told:
            self._told.add(said)
            self._tell(said)

    def _notebook(self) -> str | None:
        """Its file, where the front end tells."""
        return os.environ.get("JPY_SESSION_NAME") or self._shell.user_ns.get("__vsc_ipynb_file__")


def listed(line: str, store: "Store") -> "tuple[History | Calibration | Report | None, str | None]":
    """What `%shard history fsdp --since 7d` asks for, and the name to keep it under; None where that was help.

    Raises ShardError for a line that can't be answered, and where the history can't be read.
    """
    from ..history import SHOWN, History, calibration
    from ..report.written import place_for

    options = parse_command(line, HistoryOptions)
    if options.help:
        print(help_text())
        return None, None
    if options.json is not None:
        place_for(options.json, over=options.force)
    if len(options.words) > MOST_WORDS:
        raise ShardError(f"%shard history looks for {MOST_WORDS} words at most, not {len(options.words):,}")
    number = whole_number(options.words[0], MOST) if len(options.words) == 1 else None
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
    """What a line searches for, `fsdp --since 7d`, without how much of it is shown, kept or written."""
    filters = {"--strategy": options.strategy, "--name": options.name, "--since": options.since}
    return " ".join(
        [*options.words, *(f"{flag} {value}" for flag, value in filters.items() if value is not None)]
    )


def since(text: str, now: datetime) -> datetime:
    """The time that `--since` says: `3h`, `7d`, `2w` before `now`, or a day such as 2026-11-01.

    >>> since("7d", datetime(2026, 11, 8, 12))
    datetime.datetime(2026, 11, 1, 12, 0)

    Raises ShardError for other text.
    """
    if ago := re.fullmatch(r"(\d{1,4})([hdw])", text):
        return now - timedelta(**{_AGO[ago[2]]: int(ago[1])})
    try:
        day = datetime.fromisoformat(text)
        day.timestamp()  # of the first and the last years there is none
        return day
    except (ValueError, OverflowError, OSError):
        raise ShardError(f"--since takes 3h, 7d, 2w, or a day such as {now:%Y-%m-%d}, not {text!r}") from None


def help_text() -> str:
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
    from ..packages import installed

    known = {name: version for name, version in installed().items() if version is not None}
    return {"python": ".".join(map(str, sys.version_info[:3])), **known}
