"""One run of a loop: its numbers by name, each a bounded series, and what is measured of the loop beside them."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from ..report.metrics import Curve, Metrics, Tail
from ..temporary import Held
from .rates import Known
from .series import MOST, Series

MOST_NAMES = 24  # of numbers that the step returns; more are counted and not kept
DIGITS = 6  # of a value in a report

# What is measured of the loop: its name, and its unit.
MEASURED = {
    "step_s": "s",
    "examples_per_s": "examples/s",
    "tokens_per_s": "tokens/s",
    "flops_per_s": "FLOP/s",
    "mfu": "share",
    "memory": "bytes",
    "busy": "share",
}


@dataclass(frozen=True)
class Row:
    """What one call of the step returned: its number from 1 on, the seconds into the run at which it was seen to have
    finished, and its numbers by name."""

    step: int
    time: float
    values: Mapping[str, float]


class Run:
    """The numbers of a run: `returned` by the step, `measured` of its loop. `total()`: how many steps there will be,
    None where that is not known."""

    def __init__(self, most: int = MOST, total: Callable[[], int | None] = lambda: None):
        self._most = most
        self.total = total
        self.returned: dict[str, Series] = {}
        self.measured: dict[str, Series] = {}
        self.known = Known()
        self.loss: str | None = None  # what it is called among the numbers that the step returns
        self.steps = 0
        self.seconds = 0.0
        self.skipped = 0  # steps that went by unread
        self._left_out: set[str] = set()
        self._lock = threading.RLock()

    def add(self, row: Row) -> None:
        """Take the numbers of a step, later than those before."""
        self.seconds = row.time
        with Held(self._lock):
            for name, value in row.values.items():
                series = self.returned.get(name)
                if series is None:
                    if len(self.returned) >= MOST_NAMES:
                        self._left_out.add(name)
                        continue
                    series = self.returned[name] = Series(self._most)
                series.add(row.step, row.time, value)

    def measure(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Take what was measured of the loop up to a step, by the names of `MEASURED`."""
        self.seconds = time
        with Held(self._lock):
            for name, value in values.items():
                if name not in self.measured:
                    self.measured[name] = Series(self._most)
                self.measured[name].add(step, time, value)

    def metrics(self, tails: Sequence[Tail] | None = None) -> Metrics | None:
        """All of it as a report keeps it, where `tails` are all that there is of each curve; None where nothing is
        known."""
        curves = [tail.curve for tail in (self.tails({}) if tails is None else tails)]
        if not curves:
            return None
        more = {
            "of": self.total(),
            "skipped": self.skipped,
            "left_out": len(self._left_out),
            "loss": self.loss,
        }
        return Metrics(self.steps, _rounded(self.seconds), tuple(curves), **more)

    def tails(self, known: Mapping[str, tuple[int, int]]) -> list[Tail]:
        """What is new of each curve for whoever has so many buckets of such a width of it, by its name; the last of
        those may have grown, and of a curve whose buckets have merged all are new."""
        rules = {"examples_per_s": self.known.examples_by, "tokens_per_s": self.known.tokens_by}
        with Held(self._lock):
            found = [self._tail(name, series, known, "step") for name, series in self.returned.items()]
            for name, unit in MEASURED.items():
                if name in self.measured:
                    found.append(self._tail(name, self.measured[name], known, "loop", unit, rules.get(name)))
        return found

    def _tail(
        self, name: str, series: Series, known: Mapping[str, tuple[int, int]], *how: str | None
    ) -> Tail:
        count, width = known.get(name, (0, series.width))
        start = max(0, count - 1) if width == series.width else 0
        source, *more = how
        return Tail(_curve(name, series, start, source or "step", *more), start, series.width)


def _curve(
    name: str, series: Series, start: int, source: str, unit: str | None = None, rule: str | None = None
) -> Curve:
    buckets = list(series)[start:]
    return Curve(
        name,
        source,
        unit,
        step=tuple(b.step for b in buckets),
        min=tuple(_rounded(b.low) if b.finite else None for b in buckets),
        mean=tuple(None if b.mean is None else _rounded(b.mean) for b in buckets),
        max=tuple(_rounded(b.high) if b.finite else None for b in buckets),
        last=tuple(_rounded(b.last) for b in buckets),
        time=tuple(_rounded(b.time) for b in buckets),
        count=series.count,
        first=None if series.first is None else _rounded(series.first),
        rule=rule,
        astray=series.astray,
        before=series.before if series.astray is not None else None,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") if isfinite(value) else value
