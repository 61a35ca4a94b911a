"""What the views of a comparison show: its trials in order, the axes that they send over, and points to draw."""

from dataclasses import dataclass
from math import isfinite

from jaxshard_magic.report import MeshInfo
from jaxshard_magic.report.comparison import Comparison, Trial
from jaxshard_magic.report.metrics import Metrics
from jaxshard_magic.views import words
from jaxshard_magic.views.format import BYTE_UNITS, significant

MOST_SENT = 4  # columns
SEEN = 0.001  # of what a trial sends: less, over several axes at once, has no column
OTHERS = "others"
_NEXT_UNIT = 9_999.5  # of a column that has one unit


def in_order(comparison: Comparison) -> list[Trial]:
    """By step time; then what does not fit, and last what could not run."""

    def key(trial: Trial) -> tuple[bool, bool, bool, float, int]:
        seconds = comparison.seconds(trial)
        return failed(trial), trial.fits is False, seconds is None, seconds or 0.0, trial.peak or 0

    return sorted(comparison.trials, key=key)


def axes_of(comparison: Comparison) -> MeshInfo:
    """All mesh axes of a comparison, as of one mesh: no two of them look alike."""
    axes = {axis: size for trial in comparison.trials for axis, size in reversed(trial.mesh.items())}
    names = list(dict.fromkeys(axis for trial in comparison.trials for axis in trial.mesh))
    return MeshInfo({name: axes[name] for name in names}, "", "", "", (), 1)


def runs_of(comparison: Comparison) -> list[tuple[str, Metrics | None]]:
    """The metrics of each trial with its name, in the order of the trials; a report of the past goes by its number."""
    names = words.trial_names(comparison)
    return [
        (
            f"{words.report_text(t) or ''} {names[t.key].text}".strip(),
            None if t.report is None else t.report.metrics,
        )
        for t in comparison.trials
    ]


@dataclass(frozen=True)
class Sent:
    """Bytes that one device sends in a step, over each of `names`: an axis, several at once as `data+model`, `?` where
    it is not known over which, or what else there is. All are told in `unit`; `left_out` says that some are too few
    to tell."""

    names: tuple[str, ...]
    unit: str
    most: int
    left_out: bool

    def of(self, trial: Trial) -> list[int | None]:
        """The bytes of a trial over each; None over an axis that its mesh has not."""
        sent = trial.sent or {}
        rest = [size for name, size in sent.items() if name not in self.names]
        others = {OTHERS: sum(rest)} if rest and OTHERS in self.names else {}
        return [(sent | others).get(name) for name in self.names]

    def text(self, size: int) -> str:
        """`size` in the unit, which stands in the head."""
        value = size / 1024 ** BYTE_UNITS.index(self.unit)
        if 0 < value < 0.01:
            return "<0.01"
        return f"{round(value):,}" if value >= 999.5 else significant(value) if value else "0"


def sent_of(comparison: Comparison) -> Sent:
    """The columns: mesh axes in their order, then what goes over several at once; those over which nothing is sent are
    left out."""
    every = [trial.sent for trial in comparison.trials if trial.sent]
    most = {name: max(sent.get(name, 0) for sent in every) for sent in every for name in sent}
    told = {
        name
        for sent in every
        for name, size in sent.items()
        if size and ("+" not in name or size >= SEEN * sum(sent.values()))
    }
    kept = sorted(told, key=lambda name: -most[name])
    if len(kept) > MOST_SENT:
        kept = kept[: MOST_SENT - 1]
    order = [*axes_of(comparison).axes, *most]
    names = sorted(kept, key=order.index) + [OTHERS] * (len(kept) < len(told))
    largest = max((max(comparison for comparison in sent.values()) for sent in every), default=0)
    unit = next((u for i, u in enumerate(BYTE_UNITS) if largest / 1024**i < _NEXT_UNIT), BYTE_UNITS[-1])
    return Sent(tuple(names), unit, largest, len(told) < sum(map(bool, most.values())))


@dataclass(frozen=True)
class Point:
    """Trials that stand at the same place of the chart. `tail`: the step time that was predicted for a measured one."""

    names: tuple[str, ...]
    seconds: float
    peak: int
    tail: float | None
    on_front: bool
    usable: bool


def points_of(comparison: Comparison) -> list[Point]:
    """Those with a peak and a step time, in their order."""
    names, front = words.trial_names(comparison), {trial.key for trial in comparison.front}
    usable = {trial.key for trial in comparison.usable}
    places: dict[tuple[float, int], list[Trial]] = {}
    for trial in in_order(comparison):
        seconds = comparison.seconds(trial)
        if seconds is not None and isfinite(seconds) and trial.peak is not None:
            places.setdefault((seconds, trial.peak), []).append(trial)
    return [
        Point(
            tuple(names[t.key].text for t in group),
            seconds,
            peak,
            next((tail for t in group if (tail := words.tail(comparison, t)) is not None), None),
            any(t.key in front for t in group),
            any(t.key in usable for t in group),
        )
        for (seconds, peak), group in places.items()
    ]


def limit_of(comparison: Comparison) -> int | None:
    """The memory limit that all trials have; None where there is none, or they have several."""
    known = {trial.limit for trial in comparison.trials if trial.limit is not None}
    return known.pop() if len(known) == 1 else None


def over_text(name: str) -> str:
    """What stands at the head of a column of bytes sent."""
    return words.axes_text(None) if name == "?" else name


def flops_of(trial: Trial) -> float | None:
    """FLOPs of one device in a step."""
    timing = None if trial.report is None else trial.report.timing
    return None if timing is None else timing.device_flops


def failed(trial: Trial) -> bool:
    """Whether it could not be compiled, or did not run to its end."""
    return trial.report is None or trial.why is not None
