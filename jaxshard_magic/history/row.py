"""A line of the history: what its table tells of a report, read once, when the report is kept."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, get_args, get_origin, get_type_hints

from ..report import Report
from ..report.comparison import Trial
from ..report.parts import finite, mesh_text
from ..report.plain import plain


@dataclass(frozen=True)
class Row:
    """A report that was kept; what is not known of it is None, and never 0.

    `at` is when it was kept, in the local time zone; `typed` the options as they are typed, `--microbatches 8`;
    `device` the kind of its devices, `on` the chip that `predicted_s` is of. Times are seconds of a step, the measured
    one the median; `peak` bytes on the fullest device, `limit` those it has room for, `sent` those that one device
    sends in a step. `passed`: whether the numbers were those of the plain step; None where that is unknown.
    """

    id: int
    at: datetime
    notebook: str | None
    name: str
    strategy: str
    mesh: str  # "data=4 model=2"
    options: dict[str, Any]
    typed: str
    device: str
    source: str  # attached | simulated | topology
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


_known = lru_cache(json.loads)


def _versions(text: str) -> dict[str, str]:
    """Thousands of rows have the same."""
    return dict(_known(text))


def _types(hint: Any) -> tuple[type, ...]:
    """What a value of an annotation is: a float may be a whole number."""
    kinds = (
        [get_origin(each) or each for each in get_args(hint) or (hint,)]
        if get_origin(hint) is not dict
        else [dict]
    )
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


def facts(report: Report) -> dict[str, Any]:
    """The columns that a report alone determines."""
    from ..views import words

    mesh, timing, check = report.mesh, report.timing, report.check
    trial = Trial(report.strategy, dict(mesh.axes), {}, "", report)
    sent = trial.sent
    return {
        "name": report.name,
        "strategy": report.strategy,
        "mesh": mesh_text(mesh.axes),
        "options": plain(report.options),
        "typed": words.options_text(report),
        "device": mesh.device_kind,
        "source": mesh.source,
        "step_s": finite(trial.measured),
        "predicted_s": finite(trial.predicted),
        "on": None if timing is None else timing.on,
        "peak": trial.peak,
        "limit": trial.limit,
        "fits": trial.fits,
        "sent": None if sent is None else sum(sent.values()),
        "passed": None if check is None or (check.passed and check.by_hand) else check.passed,
    }


def searched(columns: Mapping[str, Any], cell: str | None) -> str:
    """What a word is looked for in: the columns that hold words, and the cell, as `folded`."""
    told = (_stored(columns[name]) for name in _SEARCHED)
    return folded("\n".join([*(text for text in told if text), cell or ""]))


def folded(text: str) -> str:
    """`text` in a form in which upper and lower case are alike, and that UTF-8 can write."""
    return encodable(text.casefold())


def stored(columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns as SQLite holds them."""
    return {name: _stored(value) for name, value in columns.items()}


def row_of(values: Sequence[Any]) -> Row:
    """The row of what SQLite holds in `COLUMNS`, where each value is of any type. Raises TypeError, and what reading
    text raises, for one that was not written as it is."""
    pairs = zip(_LOADERS, values, strict=True)
    loaded: list[Any] = [value if load is None or value is None else load(value) for load, value in pairs]
    if not all(map(isinstance, loaded, _TYPES)):
        raise TypeError("a column is of another type")
    return Row(*loaded)


def _stored(value: Any) -> Any:
    held = json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    return encodable(held) if isinstance(held, str) else held


def encodable(text: str) -> str:
    """`text` in a form that UTF-8 can write: names of files may hold bytes that no text has."""
    return text.encode("utf-8", "replace").decode()
