"""Data shown by all views of a comparison: sorted trials, columns of bytes sent, and points of the chart."""

from dataclasses import dataclass
from math import isfinite

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import words
from jaxshard_magic.views.format import BYTE_UNITS, UNKNOWN, printable, significant

MOST_SENT = 4  # columns of bytes, at most
SEEN = 0.001  # share of a trial's bytes: combinations of axes below it have no column
OTHERS = "others"
_NEXT_UNIT = 9_999.5  # values from which on a column has the next unit


def sorted_trials(comparison: Comparison) -> list[Trial]:
    """Return the trials by step time, then those that do not fit, then those that failed."""

    def key(trial: Trial) -> tuple[bool, bool, bool, float, int]:
        seconds = comparison.seconds(trial)
        return has_failed(trial), trial.fits is False, seconds is None, seconds or 0.0, trial.peak or 0

    return sorted(comparison.trials, key=key)


def merged_mesh(comparison: Comparison) -> MeshInfo:
    """Return one mesh with the axes of all trials, so that each axis has a look of its own. Only the axes are
    meaningful."""
    axes = {axis: size for trial in comparison.trials for axis, size in reversed(trial.mesh.items())}
    names = list(dict.fromkeys(axis for trial in comparison.trials for axis in trial.mesh))
    # Hues are numbered per mesh: two axes of different meshes could have the same hue.
    return MeshInfo.of_axes({name: axes[name] for name in names})


def trial_metrics(comparison: Comparison) -> list[tuple[str, Metrics | None]]:
    """Return (name, metrics) of each trial, in the order of the trials; None for a trial without a report.

    The name of a report of the past begins with its number.
    """
    names = words.trial_names(comparison)
    return [
        (f"{words.report_text(t) or ''} {names[t.key].text}".strip(), None if t.report is None else t.report.metrics)
        for t in comparison.trials
    ]


@dataclass(frozen=True)
class SentColumns:
    """Columns of a table of bytes sent by one device in a step.

    Attributes:
        names: Column names: a mesh axis, several axes as `data+model`, `?` for unknown axes, or `OTHERS`.
        unit: Unit of all columns.
        largest: Largest number of bytes in the table.
        has_omitted: Whether some bytes are too few for a column.
    """

    names: tuple[str, ...]
    unit: str
    largest: int
    has_omitted: bool

    def bytes_of(self, trial: Trial) -> list[int | None]:
        """Return the bytes of a trial in each column; None for an axis that its mesh does not have."""
        sent = trial.sent or {}
        rest = [size for name, size in sent.items() if name not in self.names]
        others = {OTHERS: sum(rest)} if rest and OTHERS in self.names else {}
        return [(sent | others).get(name) for name in self.names]

    def text(self, size: int) -> str:
        """Return bytes as a number in `unit`, without the unit, as the column's head has it."""
        value = size / 1024 ** BYTE_UNITS.index(self.unit)
        if 0 < value < 0.01:
            return "<0.01"
        return f"{round(value):,}" if value >= 999.5 else significant(value) if value else "0"

    def all_text(self, trial: Trial) -> str:
        """Return the bytes of a trial over each axis, without the unit: `data 473 model 288`."""
        if trial.sent is None:
            return UNKNOWN
        over = zip(self.names, self.bytes_of(trial), strict=True)
        told = (f"{printable(column_title(name))} {self.text(size)}" for name, size in over if size is not None)
        return " ".join(told) or "nothing"


def sent_columns(comparison: Comparison) -> SentColumns:
    """Return the columns of bytes sent: mesh axes in order, then combinations of axes.

    Columns without any bytes are omitted, and combinations of axes with less than 0.1% of what each trial sends. Beyond
    `MOST_SENT` columns the smallest are merged into `OTHERS`.
    """
    every = [trial.sent for trial in comparison.trials if trial.sent]
    most = {name: max(sent.get(name, 0) for sent in every) for sent in every for name in sent}
    with_bytes = {
        name
        for sent in every
        for name, size in sent.items()
        if size and ("+" not in name or size >= SEEN * sum(sent.values()))
    }
    shown = sorted(with_bytes, key=lambda name: -most[name])
    if len(shown) > MOST_SENT:
        shown = shown[: MOST_SENT - 1]
    order = [*merged_mesh(comparison).axes, *most]
    names = sorted(shown, key=order.index) + [OTHERS] * (len(shown) < len(with_bytes))
    largest = max((max(comparison for comparison in sent.values()) for sent in every), default=0)
    unit = next((u for i, u in enumerate(BYTE_UNITS) if largest / 1024**i < _NEXT_UNIT), BYTE_UNITS[-1])
    return SentColumns(tuple(names), unit, largest, len(with_bytes) < sum(map(bool, most.values())))


@dataclass(frozen=True)
class TrialPoint:
    """Trials at one position of the chart.

    Attributes:
        names: Names of the trials.
        seconds: Step time.
        peak: Peak memory in bytes.
        predicted: Predicted step time beside a measured one, in seconds; None if there is none to compare.
        on_front: Whether one of the trials is on the Pareto front.
        usable: Whether one of the trials fits and has the numbers of the plain step.
    """

    names: tuple[str, ...]
    seconds: float
    peak: int
    predicted: float | None
    on_front: bool
    usable: bool


def trial_points(comparison: Comparison) -> list[TrialPoint]:
    """Return the points of all trials with a peak and a finite step time, in the order of the table."""
    names, front = words.trial_names(comparison), {trial.key for trial in comparison.front}
    usable = {trial.key for trial in comparison.usable}
    trials_at: dict[tuple[float, int], list[Trial]] = {}
    for trial in sorted_trials(comparison):
        seconds = comparison.seconds(trial)
        if seconds is not None and isfinite(seconds) and trial.peak is not None:
            trials_at.setdefault((seconds, trial.peak), []).append(trial)
    return [
        TrialPoint(
            tuple(names[t.key].text for t in group),
            seconds,
            peak,
            next((tail for t in group if (tail := words.comparable_prediction(comparison, t)) is not None), None),
            any(t.key in front for t in group),
            any(t.key in usable for t in group),
        )
        for (seconds, peak), group in trials_at.items()
    ]


def limit_of(comparison: Comparison) -> int | None:
    """Return the memory limit shared by all trials in bytes; None if there is no limit, or several."""
    known = {trial.limit for trial in comparison.trials if trial.limit is not None}
    return known.pop() if len(known) == 1 else None


def column_title(name: str) -> str:
    """Return the heading of a column of bytes sent."""
    return words.axes_text(None) if name == "?" else name


def flops_of(trial: Trial) -> float | None:
    """Return the FLOPs of one device in a step, None if unknown."""
    timing = None if trial.report is None else trial.report.timing
    return None if timing is None else timing.device_flops


def has_failed(trial: Trial) -> bool:
    """Return whether a trial could not be compiled, or did not run to its end."""
    return trial.report is None or trial.why is not None
