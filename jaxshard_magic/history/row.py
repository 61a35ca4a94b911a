"""Rows of the history: the figures of a report shown in its table, extracted once, when the report is stored."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from ..report import Report, options_text
from ..report.comparison import Trial
from ..report.parts import finite_or_none, mesh_text
from ..report.records import to_plain


@dataclass(frozen=True)
class Row:
    """Stored report. Unknown values are None, never 0.

    Attributes:
        id: Number of the report.
        at: Time of storing, in the local time zone.
        notebook: Name or path of the notebook.
        name: Name of the step.
        strategy: Name of the strategy.
        mesh: Axes as text, such as `data=4 model=2`.
        options: Options of the report.
        typed: Options as typed, such as `--microbatches 8`.
        device: Kind of the devices.
        source: Origin of the devices: `attached`, `simulated` or `topology`.
        step_s: Measured seconds of a step, the median.
        predicted_s: Predicted seconds of a step.
        on: Chip of the prediction.
        peak: Bytes on the fullest device.
        limit: Memory of that device in bytes.
        fits: Whether the step fits in memory.
        sent: Bytes sent by one device in a step.
        passed: Whether the numbers equal the plain step's.
        versions: Versions of the packages, by name.
        has_cell: Whether the cell is stored too.
    """

    id: int
    at: datetime
    notebook: str | None
    name: str
    strategy: str
    mesh: str
    options: dict[str, Any]
    typed: str
    device: str
    source: str
    step_s: float | None
    predicted_s: float | None
    on: str | None
    peak: int | None
    limit: int | None
    fits: bool | None
    sent: int | None
    passed: bool | None
    versions: dict[str, str]
    has_cell: bool


def _local_time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC).astimezone()


_parse_cached = lru_cache(json.loads)


def _versions(text: str) -> dict[str, str]:
    """Parse package versions; cached, as thousands of rows have the same."""
    return dict(_parse_cached(text))  # a copy: the cached one would be shared by rows


def _types(hint: Any) -> tuple[type, ...]:
    """Return the types of an annotation's values: int is valid for float."""
    kinds = [get_origin(each) or each for each in get_args(hint) or (hint,)] if get_origin(hint) is not dict else [dict]
    return (*kinds, int) if float in kinds else tuple(kinds)


COLUMNS = tuple(field.name for field in fields(Row))
_SEARCHED = ("name", "strategy", "mesh", "options", "typed", "device", "notebook")
_LOADS: dict[str, Callable[[Any], Any]] = {
    "at": _local_time,
    "options": json.loads,
    "versions": _versions,
    "fits": bool,
    "passed": bool,
    "has_cell": bool,
}
_LOADERS = tuple(_LOADS.get(name) for name in COLUMNS)
_TYPES = tuple(_types(hint) for hint in get_type_hints(Row).values())


def report_columns(report: Report) -> dict[str, Any]:
    """Return the columns that follow from a report alone."""
    mesh, timing, check = report.mesh, report.timing, report.check
    trial = Trial(report.strategy, dict(mesh.axes), {}, "", report)
    sent = trial.sent
    return {
        "name": report.name,
        "strategy": report.strategy,
        "mesh": mesh_text(mesh.axes),
        "options": to_plain(report.options),
        "typed": options_text(report),
        "device": mesh.device_kind,
        "source": mesh.source,
        "step_s": finite_or_none(trial.measured),
        "predicted_s": finite_or_none(trial.predicted),
        "on": None if timing is None else timing.on,
        "peak": trial.peak,
        "limit": trial.limit,
        "fits": trial.fits,
        "sent": None if sent is None else sum(sent.values()),
        # Equality with a reference written by hand says nothing about the plain step.
        "passed": None if check is None or (check.passed and check.by_hand) else check.passed,
    }


def search_text(columns: Mapping[str, Any], cell: str | None) -> str:
    """Return the text that searches look in: columns with words and the cell, folded by `fold_case`.

    Args:
        columns: Columns of the row.
        cell: Source of the cell, or None.
    """
    told = (_sqlite_value(columns[name]) for name in _SEARCHED)
    return fold_case("\n".join([*(text for text in told if text), cell or ""]))


def fold_case(text: str) -> str:
    """Return `text` casefolded and encodable as UTF-8."""
    return encodable(text.casefold())


def sqlite_values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns as values for SQLite."""
    return {name: _sqlite_value(value) for name, value in columns.items()}


def parse_row(values: Sequence[Any]) -> Row:
    """Return the row of SQLite's values for `COLUMNS`, each of any type.

    Raises:
        TypeError: A value has another type than written by this package.
        ValueError: A value can't be parsed; other parsing errors pass as well.
    """
    pairs = zip(_LOADERS, values, strict=True)
    loaded: list[Any] = [value if load is None or value is None else load(value) for load, value in pairs]
    if not all(map(isinstance, loaded, _TYPES)):
        raise TypeError("a column is of another type")
    return Row(*loaded)


def _sqlite_value(value: Any) -> Any:
    held = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    return encodable(held) if isinstance(held, str) else held


def encodable(text: str) -> str:
    """Return `text` with characters that UTF-8 can't encode replaced by `?`."""
    # File names may contain bytes that are no UTF-8; Python represents these as lone surrogates.
    return text.encode("utf-8", "replace").decode()
